"""A synthetic timeline: an interleaved 1F1B pipeline with fixed times per pass."""

from collections.abc import Callable

import numpy as np
import pytest

from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_data import KernelTemplates, PipelineTimeline, TimelinePath, TimelineRow, TimelineSpans

FORWARD, BACKWARD, SEND = 1.0e-2, 2.0e-2, 4e-4
PassKey = tuple[int, CategoryStyle, int, int]  # (stage, category, microbatch, chunk)


def interleaved_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[CategoryStyle, int, int]]:
    """Interleaved 1F1B order of one rank (Narayanan 2021, section 2.2): warm-up, steady 1F1B, cool-down."""
    total = microbatches * chunks
    passes_per_group = stages * chunks

    def forward(k: int) -> tuple[CategoryStyle, int, int]:
        return CategoryStyle.FORWARD, k // passes_per_group * stages + k % stages, k % passes_per_group // stages

    def backward(k: int) -> tuple[CategoryStyle, int, int]:
        return (
            CategoryStyle.BACKWARD,
            k // passes_per_group * stages + k % stages,
            chunks - 1 - k % passes_per_group // stages,
        )

    warmup_limit = (stages - stage - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * stages
    warmup = min(total, warmup_limit)
    steady = [step for k in range(total - warmup) for step in (forward(warmup + k), backward(k))]
    return [forward(k) for k in range(warmup)] + steady + [backward(k) for k in range(total - warmup, total)]


def dependency(key: PassKey, stages: int, chunks: int) -> PassKey | None:
    """The pass whose output this one waits for, or None."""
    stage, category, microbatch, chunk = key
    virtual_stage = chunk * stages + stage
    if category is CategoryStyle.FORWARD:
        return (
            None
            if virtual_stage == 0
            else ((virtual_stage - 1) % stages, category, microbatch, (virtual_stage - 1) // stages)
        )
    if virtual_stage == stages * chunks - 1:
        return (stage, CategoryStyle.FORWARD, microbatch, chunk)
    return ((virtual_stage + 1) % stages, category, microbatch, (virtual_stage + 1) // stages)


def schedule_passes(
    stages: int, microbatches: int, chunks: int
) -> list[tuple[PassKey, float, float, float, PassKey | None]]:
    """(pass, waiting since, start, end, cause) of all passes, in order of start within a stage."""
    orders = {stage: interleaved_order(stage, stages, microbatches, chunks) for stage in range(stages)}
    free_at = dict.fromkeys(range(stages), 0.0)
    end_at: dict[PassKey, float] = {}
    passes = []
    while any(orders.values()):
        for stage, queue in orders.items():
            while queue and (
                (required := dependency((stage, *queue[0]), stages, chunks)) is None or required in end_at
            ):
                box: PassKey = (stage, *queue.pop(0))
                arrival = 0.0 if required is None else end_at[required] + (SEND if required[0] != stage else 0.0)
                start = max(free_at[stage], arrival)
                end = start + (FORWARD if box[1] is CategoryStyle.FORWARD else BACKWARD) / chunks
                passes.append((box, free_at[stage], start, end, required if arrival > free_at[stage] else None))
                free_at[stage] = end_at[box] = end
    return passes


def build_timeline(stages: int, microbatches: int, chunks: int = 1, label: str = "stage") -> PipelineTimeline:
    """Passes, their sends, and a gradient reduce-scatter and optimizer step at the end."""
    passes = schedule_passes(stages, microbatches, chunks)
    span_index = {box: index for index, (box, *_) in enumerate(passes)}
    columns: list[tuple[float, ...]] = []
    for (stage, category, microbatch, chunk), waiting, start, end, cause in passes:
        category_index = CATEGORY_STYLES.index(category)
        cause_index = span_index[cause] if cause else -1
        columns.append(
            (stage, 0, category_index, microbatch, chunk, waiting, start, end, 0, category_index % 2, 2, cause_index)
        )
    for (stage, _, microbatch, chunk), _, _, end, _ in passes if stages > 1 else []:
        category_index = CATEGORY_STYLES.index(CategoryStyle.PIPELINE)
        columns.append((stage, 2, category_index, microbatch, chunk, end, end, end + SEND, 2**27, 3, -1, -1))
    last_end = {
        stage: max(end for (pass_stage, *_), _, _, end, _ in passes if pass_stage == stage) for stage in range(stages)
    }
    for stage, end in last_end.items():
        reduce, step = CATEGORY_STYLES.index(CategoryStyle.DATA), CATEGORY_STYLES.index(CategoryStyle.OPTIMIZER)
        columns.append((stage, 1, reduce, -1, -1, end, end - 5e-3, end + 1e-2, 3e9, 4, -1, -1))
        columns.append((stage, 0, step, -1, -1, end, end + 1e-2, end + 1.6e-2, 0, 5, -1, len(columns) - 1))
    return PipelineTimeline(
        rows=tuple(TimelineRow(f"{label} {stage}", str(stage), stage * 8, 1024) for stage in range(stages)),
        lanes=("compute", "data parallel", "pipeline"),
        spans=build_spans(np.array(columns, dtype=float)),
        path=build_path(passes),
        kernels=KernelTemplates.empty(len(columns)),
    )


def build_spans(table: np.ndarray) -> TimelineSpans:
    """Spans of a table whose columns are in the order of the fields of `TimelineSpans`."""
    int_columns = [table[:, index].astype(np.int64) for index in range(12)]
    texts = (
        "layers' forward",
        "layers' backward",
        "matmul 61 %, attention 22 %\nbound by compute",
        "send",
        "reduce",
        "Adam",
    )
    return TimelineSpans(
        *int_columns[:5],
        table[:, 5],
        table[:, 6],
        table[:, 7],
        table[:, 8],
        int_columns[9],
        int_columns[10],
        int_columns[11],
        int_columns[11] * 0.0,
        int_columns[11] * 0.0,
        texts=texts,
    )


def build_path(passes: list[tuple[PassKey, float, float, float, PassKey | None]]) -> TimelinePath:
    """The critical path, traced back from the last end: to the cause if any, else to the stage's previous pass."""
    by_box = {box: (start, end, cause) for box, _, start, end, cause in passes}
    ends = {(box[0], round(end, 9)): box for box, _, _, end, _ in passes}
    box: PassKey | None = max(passes, key=lambda item: item[3])[0]
    segments = []
    while box is not None:
        start, end, cause = by_box[box]
        segments.append((box[0], start, end))
        box = cause or ends.get((box[0], round(start, 9)))
    row, path_starts, path_ends = zip(*reversed(segments), strict=True)
    return TimelinePath(
        np.array(row),
        np.zeros(len(row), dtype=np.int64),
        np.array(path_starts),
        np.array(path_ends),
        np.ones(len(row), np.bool_),
    )


@pytest.fixture
def make_timeline() -> Callable[..., PipelineTimeline]:
    """Builds a timeline from stages, microbatches, chunks and the row label."""
    return build_timeline
