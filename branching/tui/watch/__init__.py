"""`branching watch`: the branches of a workspace and the calls that work in them.

app                the application: screen and keys
workspace_monitor  reads the state of the workspace in a thread
branch_text        a branch as styled text
widgets            what the screen is made of
"""
