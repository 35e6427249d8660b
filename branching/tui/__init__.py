"""The faces on a terminal: `branching watch` and `branching chat`.

    watch, chat        applications: screens and keys (Textual; the extra `tui`)
    observation        what there is to be seen in a workspace, gathered in a thread
    deeds              what a person can do to a branch
    comparison         two sides of a file, line beside line
    chatting           the session of a chat: commands, states; knows no screen

What reads files, or asks the daemon or another process, runs in `errands`: never in the event loop.
Only the applications import Textual; all else can be used, and is tested, without it.
"""
