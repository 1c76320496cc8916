"""What does `clustersim run --watch` do? Simulate again whenever a file of the scenario is saved, until Ctrl-C.

The modification time, size and inode of each file are polled a few times a second: that works on every file
system, and also where an editor replaces the file with a new one. A save is complete when two successive
polls agree. A missing file may be about to be replaced, and is waited for longer.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import sleep, strftime
from typing import Final

from clustersim.cli.outputs import Outputs, print_error
from clustersim.cli.run import simulate_and_report
from clustersim.common.data_files import read_text
from clustersim.common.errors import ClusterSimError
from clustersim.scenario import Scenario

POLL_SECONDS: Final = 0.2  # seconds between polls
_MISSING_FILE_POLLS: Final = 10  # polls after which a missing file counts as deleted

FileStamp = tuple[int, int, int] | None  # None: there is no such file


def run_watched(file: Path, overrides: Sequence[str], outputs: Outputs) -> None:
    """Simulate now and after every save; an error is printed as one sentence and the next save awaited.

    Raises InputError or OutputError at the start, where the file cannot be read or an output cannot be written.
    The watched files are those that the scenario referred to when it was last read successfully.
    """
    with suppress(KeyboardInterrupt):
        outputs.check_writable((file,))
        read_text(file)
        watcher = FileWatcher([file])
        while True:
            if outputs.table:
                print(f"{strftime('%H:%M:%S')} {file}", flush=True)
            try:
                scenario = Scenario.load(file, overrides)
                watcher.watch_files([file, *scenario.files])
                simulate_and_report(scenario, (file, *scenario.files), outputs)
            except ClusterSimError as error:
                print_error(error)
            sys.stdout.flush()
            watcher.wait_for_save()


class FileWatcher:
    """Polls files for changes since their last known state."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stamps: dict[Path, FileStamp] = {}
        self.watch_files(files)

    def watch_files(self, files: Iterable[Path]) -> None:
        """Watch these files from now on; files already watched keep their last known state, so no save is missed."""
        self._stamps = {file: self._stamps[file] if file in self._stamps else _file_stamp(file) for file in files}

    def wait_for_save(self) -> None:
        """Return once any file has changed and its new state is stable."""
        previous, unchanged_polls = self._stamps, 0
        while True:
            sleep(POLL_SECONDS)
            current = {file: _file_stamp(file) for file in self._stamps}
            unchanged_polls = unchanged_polls + 1 if current == previous else 0
            previous = current
            is_missing = any(current[file] is None and stamp is not None for file, stamp in self._stamps.items())
            if current != self._stamps and unchanged_polls >= (_MISSING_FILE_POLLS if is_missing else 1):
                self._stamps = current
                return


def _file_stamp(file: Path) -> FileStamp:
    """Modification time, size and inode of a file; None where it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
