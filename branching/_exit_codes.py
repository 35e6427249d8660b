"""Exit codes of commands, as shells, coreutils and Docker have them."""

EXIT_NOTHING_SUCCEEDED = 1
"""Of the search commands: no candidate succeeded."""
EXIT_USAGE = 2
"""The command line is wrong; nothing was done."""
EXIT_TIMEOUT = 124
"""The time limit was over."""
EXIT_OURS = 125
"""`branching` itself failed: no workspace, a dead mount, a commit that was refused."""
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128
"""128+n: killed by signal n. 141 (SIGPIPE): the reader of the output is gone."""
EXIT_KILLED = EXIT_SIGNAL_BASE + 9
