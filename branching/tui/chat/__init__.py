"""`branching chat`: the session, which knows no screen, and the application around it.

    app             the application: screen and keys (Textual)
    session         which tab is open, what may be done now; carries commands out
    conversation    the parent's runs, one at a time
    merging         how a fork ends: the picker, the judge, an override
    command_parser  reads what was typed
    fork_settings   the commands that settle how a fork is made
    costs           what a fork has cost, in words
    fork_registry   where forks are kept for the next chat
    transcripts     what was said, tab by tab
    settings        what is remembered of that
    protocols       what an agent must offer, and what a front end hears
    pydantic_agent  pydantic-ai's agents; the only file that knows a model

A front end gives the session what was typed (`submit`), does what comes back (`Wanted`: open a
picker, quit), shows `lines`, and calls `tick` now and then. Everything belongs to one event loop.
"""
