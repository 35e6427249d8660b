"""The `branching` command, also as `python -m branching`.

A signal that comes while Python loads the command ends it as it ends any program: without a word.
So the default is restored before anything else is imported. What the caller has us ignore (nohup,
a shell's background job) stays ignored.
"""

import signal

if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from branching.cli import main

if __name__ == "__main__":
    main()
