"""What does `clustersim run --watch` do? Answer again whenever a file of the scenario is saved, until Ctrl-C.

A few times a second each file is asked when it was written, how long it is and which one on the disk it is: that
works on every file system, and also where an editor puts a new file in the place of the old one. A save is over when
two looks in a row see the same. A file that is gone may be about to come back, and is given longer.
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

POLL_SECONDS: Final = 0.2  # seconds between looks
_MISSING_FILE_POLLS: Final = 10  # looks after which a file is gone for good

FileStamp = tuple[int, int, int] | None  # None: there is no such file


def run_watched(file: Path, overrides: Sequence[str], outputs: Outputs) -> None:
    """Answer at once and after every save; what cannot be answered or written is one sentence until the next save.

    Raises InputError or OutputError at the beginning, where the file cannot be read or an output cannot be written.
    Files that the scenario refers to are those of the last time that it could be read.
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
    """Files, each as it was when it was last looked at."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stamps: dict[Path, FileStamp] = {}
        self.watch_files(files)

    def watch_files(self, files: Iterable[Path]) -> None:
        """Wait for these from now on; of those among them that are known, what changed meanwhile is still a save."""
        self._stamps = {file: self._stamps[file] if file in self._stamps else _file_stamp(file) for file in files}

    def wait_for_save(self) -> None:
        """Return once any of them is not what it was, and stays so."""
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
    """When a file was written, how long it is, and which one it is."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
