"""Two versions of files, side by side.

line_diff      which line stands beside which
diff_sources   the versions: two branches of a workspace, or a fork's report
patch_sources  the versions: the patches kept of branches that have ended
syntax         the colours of the lines, by the language of the file
diff_view      the widget
diff_screen    the screen
"""
