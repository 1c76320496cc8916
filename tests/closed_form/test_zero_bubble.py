"""Zero-bubble schedules through lowering and engine, against closed forms.

p ranks with one layer each, m microbatches; a forward, the input gradient and the weight gradient take a
second each. The steady-state seconds of a step are the difference between the ends of consecutive steps.
"""

from dataclasses import replace

import pytest

from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.layout import Layout
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.schedules.zero_bubble_v import ZeroBubbleV
from tests.closed_form.fixed_durations import MODEL, FixedDurations, Step
from tests.uniform_models import model_dimensions

EQUAL = FixedDurations(forward=1.0, backward=1.0, weight=1.0)
SHAPES = [(2, 3), (2, 6), (3, 5), (4, 7), (4, 12)]


def steady_state_seconds(step: Step) -> float:
    """Step time in steady state: by how much a fourth step extends three."""
    return step.run(EQUAL, steps=4).makespan - step.run(EQUAL, steps=3).makespan


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("clipping", [False, True])
@pytest.mark.parametrize(("schedule", "idle"), [(ZeroBubble(1), 1), (ZeroBubble(2), 0)])
def test_consecutive_steps_have_the_bubble_of_the_paper(
    schedule: Schedule, idle: int, *, clipping: bool, ranks: int, microbatches: int
) -> None:
    """Qi et al. 2023, table 2 with F = I = W: (p - 1)(F + I - W) for ZB-H1, (p - 1)(F + I - 2 W) = 0 for ZB-H2.

    Clipped or not: the norm is handed on along the pipeline, as ranks are done.
    """
    step = Step(ranks, Layout(pp=ranks), schedule, microbatches, training={"gradient_clipping": clipping})
    assert steady_state_seconds(step) == 3 * microbatches + idle * (ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_a_single_zb_2p_step_starts_and_ends_one_forward_apart(ranks: int, microbatches: int) -> None:
    """Without a bubble on any rank (m of at least 2 p - 1) rank r is busy from r to r + 3 m."""
    step = Step(ranks, Layout(pp=ranks), ZeroBubble(2), microbatches)
    assert step.step_seconds(EQUAL) == 3 * microbatches + ranks - 1


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("clipping", [False, True])
def test_zb_v_has_no_bubble_in_consecutive_steps(*, clipping: bool, ranks: int, microbatches: int) -> None:
    """Qi et al. 2023, section 6: with F = I = W and 2 p - 1 microbatches or more ranks work through, p - 1 s apart.

    Two stages of a layer on each rank are 6 m seconds of work; as many microbatches as 1F1B's first rank keeps.
    """
    step = Step(2 * ranks, Layout(pp=ranks), ZeroBubbleV(), microbatches, training={"gradient_clipping": clipping})
    assert steady_state_seconds(step) == 6 * microbatches
    assert step.step_seconds(EQUAL) == 6 * microbatches + ranks - 1


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_1f1b_waits_for_full_backwards(ranks: int, microbatches: int) -> None:
    """(p - 1)(F + I + W) of bubble, three times that of ZB-1p, whether ranks wait for the norm or not."""
    step = Step(ranks, Layout(pp=ranks), OneFOneB(), microbatches)
    assert step.step_seconds(EQUAL) == 3 * (microbatches + ranks - 1)


def test_reductions_overlap_the_remaining_weight_gradients() -> None:
    """Two microbatches of two layers; a reduction of an MLP matrix's gradient takes half a second.

    In the last half the second layer's second matrix is reduced during the first one's gradient (from 0 to 0.5 s
    of 2 s), its first one (1 to 1.5) and the first layer's second (1.5 to 2) during the first layer's; the last
    is exposed.
    """
    matrix_bytes = 4.0 * MODEL.hidden * model_dimensions(MODEL).ffn
    durations = replace(
        EQUAL, comm_seconds={"reduce gradients": lambda comm_op: 0.5 if comm_op.payload == matrix_bytes else 0.0}
    )
    step = Step(2, Layout(dp=2, data=DdpStrategy(bucket=1.0)), ZeroBubble(1), 2)
    assert [comm_op.payload for comm_op in step.issued_comm_ops("reduce gradients")].count(matrix_bytes) == 4
    assert step.step_seconds(durations) == 3 * 2 * 2 + 0.5
