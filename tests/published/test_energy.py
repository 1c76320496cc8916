"""Published energy, power and GPU hours of training runs against the economics of a simulated step.

Most published energies are hours times the datasheet's power limit: these check the arithmetic, and the step
time. Few are measured: a node of eight H100 that trains Llama 2 13B, and the GPUs that trained OLMo 2.
"""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.hardware.power import GpuActivity, PowerDraw
from clustersim.hardware.prices import Price, PriceQuote
from clustersim.results.economics import Economics, GpuGroup

AT_POWER_LIMIT = ["economics.power.rest=0 W", "economics.power.idle=700 W", *(
    f"economics.power.{item}=1.0" for item in ("memory_bound", "exposed_communication")
)]  # fmt: skip
"""The assumption of model cards: every GPU draws its power limit all the time, nothing else draws power."""


@pytest.mark.parametrize(
    ("hours", "mwh", "tonnes"),
    [(82_432, 36, 14), (135_168, 59, 23), (530_432, 233, 90), (1_022_362, 449, 173)],
    ids=["7B", "13B", "33B", "65B"],
)
def test_llama_table_15_energy_and_carbon(hours: int, mwh: float, tonnes: float) -> None:
    """Touvron et al. 2023 (arXiv:2302.13971), table 15: 400 W, PUE 1.1, 385 g/kWh; whole MWh and tonnes are printed."""
    draw = PowerDraw(dict.fromkeys(GpuActivity, 400.0), None)
    seconds = {**dict.fromkeys(GpuActivity, 0.0), GpuActivity.MATMUL: 3600.0}
    gpus = GpuGroup("a100", hours, seconds, PriceQuote(Price(2.0, "USD"), "given"), draw)
    run = Economics((gpus,), 3600.0, 1.0, pue=1.1, carbon_intensity=385 / 3.6e6)
    assert (run.energy_per_step or 0.0) / 3.6e9 == pytest.approx(mwh, abs=1.0)
    assert (run.carbon_per_step or 0.0) / 1e6 == pytest.approx(tonnes, abs=1.0)
    assert run.cost_per_step == pytest.approx(2.0 * hours)


def test_bloom_energy_and_carbon() -> None:
    """Luccioni et al. 2022 (arXiv:2211.02001), table 1: 1,082,990 hours at 400 W are 433,196 kWh; 57 g each 24.69 t."""
    draw = PowerDraw(dict.fromkeys(GpuActivity, 400.0), None)
    gpus = GpuGroup("a100", 1_082_990, {**dict.fromkeys(GpuActivity, 0.0), GpuActivity.MATMUL: 3600.0}, None, draw)
    run = Economics((gpus,), 3600.0, 1.0, carbon_intensity=57 / 3.6e6)
    assert (run.energy_per_step or 0.0) / 3.6e6 == pytest.approx(433_196, abs=1.0)
    assert (run.carbon_per_step or 0.0) / 1e6 == pytest.approx(24.69, abs=0.01)


def test_llama_3_405b_gpu_hours_and_energy() -> None:
    """Model card of Llama 3.1: 30.84 M GPU hours at 700 W (8,930 t CO2), 15.6 T tokens (arXiv:2407.21783).

    Within 10 % of those nine tenths that were steps (section 3.3.4: "higher than 90% effective training time"), some of
    other sequence lengths and on other numbers of GPUs.
    """
    steps_share = 0.9
    scenario = Scenario.load("examples/llama3_405b_16k.yaml", ["economics.tokens=15.6T", *AT_POWER_LIMIT])
    economics = simulate(scenario).economics
    assert (economics.run_energy or 0.0) / 3.6e12 == pytest.approx(steps_share * 30.84 * 0.7, rel=0.10)  # GWh
    price = economics.price_per_gpu_hour
    assert price is not None
    assert (economics.run_cost or 0.0) / price.amount == pytest.approx(steps_share * 30.84e6, rel=0.10)


NODE: dict[str, Any] = {
    "model": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000, "name": "llama2-13b"},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"data": "fsdp"},
    "training": {"sequence": 2048, "global_batch": 32, "microbatch": 2, "recompute": "full"},
    "framework": "nemo",
}


@pytest.mark.parametrize(
    "changes", [[], ["training.recompute=none", "training.global_batch=16", "training.microbatch=1"]]
)
def test_llama_2_13b_power_of_a_node_of_8_h100(changes: list[str]) -> None:
    """Latif et al. 2024 (arXiv:2412.08602): 7.92 kW, the median (as quoted), and at most 8.4 kW over all their runs.

    The batch size is not stated, so two are tried. Within 6 %: of the constants only the remaining node power is
    from that node, and from another run (the 8.4 kW).
    """
    watts = simulate(Scenario.from_mapping(NODE, changes)).economics.power
    assert watts == pytest.approx(7920.0, rel=0.06)
    assert (watts or 0.0) < 8400.0


def test_olmo_2_gpu_power() -> None:
    """Morrison et al. 2025 (arXiv:2503.05804): while training, H100 draw 85 % of their maximum of 700 W.

    Within 12 %: matmuls are assumed to draw the full limit, whatever their size.
    """
    layers = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 100352, "name": "olmo2-7b"}
    changes: dict[str, Any] = {
        "model": {**layers, "block": "post_norm", "qk_norm": "whole"},
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "training": {"sequence": 4096, "global_batch": 1024, "microbatch": 2},
    }
    economics = simulate(Scenario.from_mapping({**NODE, **changes})).economics
    assert economics.gpu_power == pytest.approx(0.85 * 700, rel=0.12)
