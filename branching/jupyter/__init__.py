"""A Jupyter kernel whose cells run in a session. Requires the extra `jupyter`.

    Jupyter ── ZeroMQ ── kernel (`kernel`) ── session ── IPython shell in the sandbox (`shell`)

The kernel process has the sockets and the threads of ipykernel, and never forks. The interpreters
behind it are those of a `branching.Session`: a cell runs in the session, or in one of its children,
and `%pick` makes a child the interpreter that answers from then on.
"""
