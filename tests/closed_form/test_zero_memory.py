"""The ZeRO paper's memory of model states, exactly.

Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1 and Table 1: Psi parameters in fp16, fp16 gradients and K = 12
bytes of optimizer state per parameter (fp32 master weight and two moments) on N data-parallel ranks take
(2 + 2 + K) Psi, 4 Psi + K Psi / N, 2 Psi + (2 + K) Psi / N and (4 + K) Psi / N bytes for stages 0 to 3.
"""

import pytest

from clustersim.common.dtypes import DType
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.model.framework_files import load_framework
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import parameter_count
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MODEL = load_preset("megatron-7.5b")
FP16 = mixed_precision(compute=DType.FP16, gradients=DType.FP16)
STATES = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
STAGES: list[DataParallelStrategy] = [DdpStrategy(), Zero1(), Zero2(), FullyShard()]


def bytes_per_parameter(data: DataParallelStrategy, ranks: int) -> float:
    plan = Plan(MODEL, Training(2048, ranks, recipe=FP16), Layout(dp=ranks, data=data))
    resident_bytes = Footprint(plan, load_framework("megatron-deepspeed"), context_bytes=0.0).resident_bytes(0)
    return sum(resident_bytes[category] for category in STATES) / parameter_count(MODEL)


@pytest.mark.parametrize(("data", "gigabytes"), list(zip(STAGES, [120.0, 31.4, 16.6, 1.9], strict=True)))
def test_figure_1(data: DataParallelStrategy, gigabytes: float) -> None:
    """7.5 B parameters, 64 ranks; the paper prints three digits and two."""
    assert bytes_per_parameter(data, 64) * 7.5 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "gigabytes"),
    [
        (1, (120, 120, 120)),
        (4, (52.5, 41.3, 30)),
        (16, (35.6, 21.6, 7.5)),
        (64, (31.4, 16.6, 1.88)),
        (256, (30.4, 15.4, 0.47)),
        (1024, (30.1, 15.1, 0.12)),
    ],
)
def test_table_1(ranks: int, gigabytes: tuple[float, float, float]) -> None:
    """Printed with three digits, the last one cut or rounded."""
    for data, printed in zip(STAGES[1:], gigabytes, strict=True):
        assert bytes_per_parameter(data, ranks) * 7.5 == pytest.approx(printed, abs=0.07 if printed > 1 else 0.005)


@pytest.mark.parametrize("ranks", [1, 2, 64, 1024])
def test_formulas(ranks: int) -> None:
    expected = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    assert [bytes_per_parameter(data, ranks) for data in STAGES] == pytest.approx(expected, rel=1e-12)
