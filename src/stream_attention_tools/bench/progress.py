"""What a run shows while it runs, on stderr: a bar on a terminal that has rich, else a plain line per finished cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Progress(NamedTuple):
    now: Callable[[str], None]  # shows what is being done
    done: Callable[[str], None]  # counts one more, and prints its line


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            pass
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Bar(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=total)

                def now(text: str) -> None:
                    bar.update(task, description=text, refresh=True)

                def done(line: str) -> None:
                    bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
                    bar.update(task, advance=1, description="")

                yield Progress(now, done)
            return
    yield Progress(lambda text: None, lambda line: print(line, file=sys.stderr, flush=True))
