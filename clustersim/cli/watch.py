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

from clustersim.cli.outputs import Outputs, complain
from clustersim.cli.run import answer
from clustersim.common.data_files import read_text
from clustersim.common.errors import ClusterSimError
from clustersim.scenario import Scenario

EVERY: Final = 0.2  # seconds between looks
_PATIENCE: Final = 10  # looks after which a file is gone for good

Stamp = tuple[int, int, int] | None  # None: there is no such file


def run_watched(file: Path, overrides: Sequence[str], outputs: Outputs) -> None:
    """Answer at once and after every save; what cannot be answered or written is one sentence until the next save.

    Raises InputError or OutputError at the beginning, where the file cannot be read or an output cannot be written.
    Files that the scenario refers to are those of the last time that it could be read.
    """
    with suppress(KeyboardInterrupt):
        outputs.require((file,))
        read_text(file)
        saves = Saves([file])
        while True:
            if outputs.table:
                print(f"{strftime('%H:%M:%S')} {file}", flush=True)
            try:
                scenario = Scenario.load(file, overrides)
                saves.follow([file, *scenario.files])
                answer(scenario, (file, *scenario.files), outputs)
            except ClusterSimError as error:
                complain(error)
            sys.stdout.flush()
            saves.wait()


class Saves:
    """Files, each as it was when it was last looked at."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._seen: dict[Path, Stamp] = {}
        self.follow(files)

    def follow(self, files: Iterable[Path]) -> None:
        """Wait for these from now on; of those among them that are known, what changed meanwhile is still a save."""
        self._seen = {file: self._seen[file] if file in self._seen else _stamp(file) for file in files}

    def wait(self) -> None:
        """Return once any of them is not what it was, and stays so."""
        last, same = self._seen, 0
        while True:
            sleep(EVERY)
            now = {file: _stamp(file) for file in self._seen}
            same = same + 1 if now == last else 0
            last = now
            gone = any(now[file] is None and seen is not None for file, seen in self._seen.items())
            if now != self._seen and same >= (_PATIENCE if gone else 1):
                self._seen = now
                return


def _stamp(file: Path) -> Stamp:
    """When a file was written, how long it is, and which one it is."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
