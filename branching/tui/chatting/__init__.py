"""The session of a chat, without a screen.

    session      which tab is open, what may be done now; carries commands out
    conversation the parent's runs, one at a time
    merging      how a fork ends: the picker, the judge, an override
    commands     reading what was typed
    forking      the commands that settle how a fork is made
    costs        what a fork has cost, in words
    kept         where forks are kept for the next chat
    transcripts  what was said, tab by tab
    settings     what is remembered of that
    voice        who is talked with (a protocol), and what is heard
    agents       pydantic-ai's agents as voices; the only file that knows a model

A front end gives the session what was typed (`submit`), does what comes back (`Wanted`: open a
picker, quit), shows `lines`, and calls `tick` now and then. Everything belongs to one event loop.
"""
