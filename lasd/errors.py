"""User-facing errors: one line that says what came, what was expected and what to do."""

import errno
import sys
from collections.abc import Callable


class LasdError(ValueError):
    """An error the user can mend. Its text is one line: what came, what was expected, what to do."""


def entry(main: Callable[[], None]) -> None:
    """Runs the `main` of a command; prints a `LasdError` or a full disk as one line on stderr and exits with code 2."""
    try:
        main()
    except LasdError as error:
        line = " ".join(str(error).split())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        line = (
            f"no space left on the disk{where}: free some space and run the same command again; finished work is kept"
        )
    else:
        return
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)
