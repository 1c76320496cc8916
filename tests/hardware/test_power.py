"""GPU power: from idle to TDP, by activity."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.power import GpuActivity, PowerOverrides, PowerSpec, load_power_fractions
from tests.sentences import parts

WATTS = {"matmul": 700.0, "memory_bound": 350.0, "exposed_communication": 350.0, "idle": 121.7}
H100 = PowerSpec(700.0, 121.7, 1275.0)


def watts_by_activity(power: PowerSpec | None, powers: PowerOverrides) -> dict[str, float]:
    draw = powers.resolve_draw(power)
    assert draw is not None
    return {activity.value: watts for activity, watts in draw.by_activity.items()}


@pytest.mark.parametrize("name", data_files.list_names("accelerators"))
def test_packaged_power_is_between_idle_and_tdp(name: str) -> None:
    accelerator = load_accelerator(name)
    power = accelerator.power
    assert (power is None) is ("power" in accelerator.unknown)
    if power is None:
        return
    draw = PowerOverrides().resolve_draw(power)
    assert draw is not None
    assert set(draw.by_activity) == set(GpuActivity)
    assert 0 < draw.by_activity[GpuActivity.WAITING] <= min(draw.by_activity.values())
    assert max(draw.by_activity.values()) == power.tdp
    assert draw.node_rest is None or power.node_share is None or 0 < draw.node_rest < power.node_share - power.tdp


def test_the_power_of_an_h100_is_that_of_its_datasheet_and_of_a_dgx() -> None:
    assert load_accelerator("h100-sxm-80gb").power == H100
    assert watts_by_activity(H100, PowerOverrides()) == WATTS


def test_a_node_of_8_h100_draws_at_most_what_was_measured() -> None:
    """Latif et al. (arXiv:2412.08602): 8.4 kW of 10.2. Each GPU: 700 W, and (8.4 - 5.6) / (10.2 - 5.6) of the rest."""
    draw = PowerOverrides().resolve_draw(H100)
    assert draw is not None
    assert draw.node_rest == pytest.approx(0.61 * (1275 - 700))
    assert 8 * (700 + (draw.node_rest or 0.0)) == pytest.approx(8400, rel=0.005)
    assert load_power_fractions().rest == pytest.approx((8.4 - 5.6) / (10.2 - 5.6), abs=0.005)


def test_unmeasured_idle_power_is_a_fifth_of_tdp() -> None:
    assert watts_by_activity(PowerSpec(1000.0), PowerOverrides())["idle"] == 200.0


def test_given_powers_override_packaged_data() -> None:
    assert watts_by_activity(H100, PowerOverrides(idle=100.0)) == {**WATTS, "idle": 100.0}
    assert watts_by_activity(H100, PowerOverrides(memory_bound=0.8, exposed_communication=0.3)) == {
        **WATTS,
        "memory_bound": 560.0,
        "exposed_communication": 210.0,
    }
    capped = PowerOverrides(tdp=500.0).resolve_draw(H100)
    assert capped is not None
    assert capped.by_activity[GpuActivity.MATMUL] == 500.0
    assert capped.node_rest == PowerOverrides().resolve_draw(H100).node_rest  # type: ignore[union-attr]
    no_node_power = PowerOverrides(rest=0.0).resolve_draw(H100)
    assert no_node_power is not None
    assert no_node_power.node_rest == 0.0


def test_power_needs_a_tdp() -> None:
    assert PowerOverrides().resolve_draw(None) is None
    assert PowerOverrides(idle=10.0).resolve_draw(None) is None
    draw = PowerOverrides(tdp=65.0).resolve_draw(None)
    assert draw is not None
    assert draw.by_activity[GpuActivity.WAITING] == pytest.approx(13.0)
    assert draw.node_rest is None


@pytest.mark.parametrize(
    ("powers", "message"),
    [
        (PowerOverrides(idle=701.0), "idle 701 W is above tdp 700 W"),
        (PowerOverrides(memory_bound=0.1), "memory_bound draws 70 W, less than a GPU that is idle"),
        (PowerOverrides(matmul=0.0), "matmul draws 0 W"),
    ],
)
def test_power_below_idle_is_rejected(powers: PowerOverrides, message: str) -> None:
    with pytest.raises(InputError, match=message):
        powers.resolve_draw(H100)


@pytest.mark.parametrize(
    ("power", "message"),
    [
        ({"tdp": 700}, "power.tdp: 700 ... no unit ... '700 W'"),
        ({"tdp": "0 W"}, "power.tdp: '0 W' is not above zero"),
        ({"tdp": "700 W", "idle": "1 kW"}, "power.idle: 1 kW is above tdp 700 W"),
        ({"tdp": "700 W", "node": "600 W"}, "power.node: 600 W is below tdp 700 W"),
        ({"tpd": "700 W"}, "power.tdp: is missing"),
        ({"tdp": "700 W", "idel": "70 W"}, "power.idel: unknown key; did you mean power.idle?"),
    ],
)
def test_an_invalid_power_section_is_rejected(tmp_path: Path, power: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(data_files.read_mapping(data_files.find_file("accelerators", "mi300x")) | {"power": power})
    )
    with pytest.raises(InputError) as caught:
        load_accelerator(str(path))
    assert parts(message).search(str(caught.value))
