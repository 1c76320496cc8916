"""A made-up timeline to draw: a pipeline with the interleaved 1F1B order, run with fixed times per box."""

from collections.abc import Callable

import numpy as np
import pytest

from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_data import KernelTemplates, PipelineTimeline, TimelinePath, TimelineRow, TimelineSpans

FORWARD, BACKWARD, SEND = 1.0e-2, 2.0e-2, 4e-4
Box = tuple[int, CategoryStyle, int, int]  # stage, category, microbatch, chunk


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[CategoryStyle, int, int]]:
    """Interleaved 1F1B of one rank (Narayanan 2021, section 2.2): warm-up forwards, then one of each, then the rest."""
    total = microbatches * chunks
    group = stages * chunks

    def forward(k: int) -> tuple[CategoryStyle, int, int]:
        return CategoryStyle.FORWARD, k // group * stages + k % stages, k % group // stages

    def backward(k: int) -> tuple[CategoryStyle, int, int]:
        return CategoryStyle.BACKWARD, k // group * stages + k % stages, chunks - 1 - k % group // stages

    extra = (stages - stage - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * stages
    warm = min(total, extra)
    middle = [step for k in range(total - warm) for step in (forward(warm + k), backward(k))]
    return [forward(k) for k in range(warm)] + middle + [backward(k) for k in range(total - warm, total)]


def needs(box: Box, stages: int, chunks: int) -> Box | None:
    """The box whose output this one waits for."""
    stage, category, microbatch, chunk = box
    place = chunk * stages + stage
    if category is CategoryStyle.FORWARD:
        return None if place == 0 else ((place - 1) % stages, category, microbatch, (place - 1) // stages)
    if place == stages * chunks - 1:
        return (stage, CategoryStyle.FORWARD, microbatch, chunk)
    return ((place + 1) % stages, category, microbatch, (place + 1) // stages)


def run(stages: int, microbatches: int, chunks: int) -> list[tuple[Box, float, float, float, Box | None]]:
    """(box, waiting since, start, end, cause) in order of start within a stage."""
    queues = {stage: order(stage, stages, microbatches, chunks) for stage in range(stages)}
    free = dict.fromkeys(range(stages), 0.0)
    done: dict[Box, float] = {}
    out = []
    while any(queues.values()):
        for stage, queue in queues.items():
            while queue and ((need := needs((stage, *queue[0]), stages, chunks)) is None or need in done):
                box: Box = (stage, *queue.pop(0))
                came = 0.0 if need is None else done[need] + (SEND if need[0] != stage else 0.0)
                start = max(free[stage], came)
                end = start + (FORWARD if box[1] is CategoryStyle.FORWARD else BACKWARD) / chunks
                out.append((box, free[stage], start, end, need if came > free[stage] else None))
                free[stage] = done[box] = end
    return out


def timeline(stages: int, microbatches: int, chunks: int = 1, label: str = "stage") -> PipelineTimeline:
    """Boxes, their sends, and a gradient reduce-scatter and optimizer step at the end."""
    ran = run(stages, microbatches, chunks)
    number = {box: index for index, (box, *_) in enumerate(ran)}
    columns: list[tuple[float, ...]] = []
    for (stage, category, microbatch, chunk), waiting, start, end, cause in ran:
        look = CATEGORY_STYLES.index(category)
        after = number[cause] if cause else -1
        columns.append((stage, 0, look, microbatch, chunk, waiting, start, end, 0, look % 2, 2, after))
    for (stage, _, microbatch, chunk), _, _, end, _ in ran if stages > 1 else []:
        look = CATEGORY_STYLES.index(CategoryStyle.PIPELINE)
        columns.append((stage, 2, look, microbatch, chunk, end, end, end + SEND, 2**27, 3, -1, -1))
    last = {stage: max(end for (at, *_), _, _, end, _ in ran if at == stage) for stage in range(stages)}
    for stage, end in last.items():
        reduce, step = CATEGORY_STYLES.index(CategoryStyle.DATA), CATEGORY_STYLES.index(CategoryStyle.OPTIMIZER)
        columns.append((stage, 1, reduce, -1, -1, end, end - 5e-3, end + 1e-2, 3e9, 4, -1, -1))
        columns.append((stage, 0, step, -1, -1, end, end + 1e-2, end + 1.6e-2, 0, 5, -1, len(columns) - 1))
    return PipelineTimeline(
        rows=tuple(TimelineRow(f"{label} {stage}", str(stage), stage * 8, 1024) for stage in range(stages)),
        lanes=("compute", "data parallel", "pipeline"),
        spans=spans(np.array(columns, dtype=float)),
        path=path(ran),
        kernels=KernelTemplates.empty(len(columns)),
    )


def spans(table: np.ndarray) -> TimelineSpans:
    """Columns in the order of Spans' fields."""
    whole = [table[:, index].astype(np.int64) for index in range(12)]
    texts = (
        "layers' forward",
        "layers' backward",
        "matmul 61 %, attention 22 %\nbound by compute",
        "send",
        "reduce",
        "Adam",
    )
    return TimelineSpans(
        *whole[:5],
        table[:, 5],
        table[:, 6],
        table[:, 7],
        table[:, 8],
        whole[9],
        whole[10],
        whole[11],
        whole[11] * 0.0,
        whole[11] * 0.0,
        texts=texts,
    )


def path(ran: list[tuple[Box, float, float, float, Box | None]]) -> TimelinePath:
    """Back from the last end: through the cause where there was one, else through the stage's previous box."""
    by_box = {box: (start, end, cause) for box, _, start, end, cause in ran}
    ends = {(box[0], round(end, 9)): box for box, _, _, end, _ in ran}
    box: Box | None = max(ran, key=lambda item: item[3])[0]
    pieces = []
    while box is not None:
        start, end, cause = by_box[box]
        pieces.append((box[0], start, end))
        box = cause or ends.get((box[0], round(start, 9)))
    row, start_, end_ = zip(*reversed(pieces), strict=True)
    return TimelinePath(
        np.array(row), np.zeros(len(row), dtype=np.int64), np.array(start_), np.array(end_), np.ones(len(row), np.bool_)
    )


@pytest.fixture
def make_timeline() -> Callable[..., PipelineTimeline]:
    """Build a timeline from stages, microbatches, chunks and what a row is called."""
    return timeline
