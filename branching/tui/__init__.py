"""The terminal applications: `branching watch` and `branching chat`.

    watch       the branches of a workspace
    chat        a conversation with an agent that forks
    diff        two versions of files, side by side
    actions     what a person can do to a branch
    dialogs     questions in a window of their own

What reads files, or asks the daemon or another process, runs in a `QueueThread`: never in the event
loop. Only the applications import Textual; all else can be used, and is tested, without
it.
"""
