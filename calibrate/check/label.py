"""Which calls of a real step are labelled for a profile?

Those that run while one is taken. `torch.profiler.record_function` costs the host about 10 us also where nobody
listens, as much as some launches; what users train has no such labels, so a step that is timed has none either.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler


def record_function(name: str) -> AbstractContextManager[object]:
    """Torch's label of that name where a profiler runs (by torch's own flag of it), nothing elsewhere."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()
