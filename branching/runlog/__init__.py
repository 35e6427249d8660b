"""Calls under way: their logs, and control over them from other processes.

run_log         output, state and result of each candidate, beside the store
patches         the patch of each branch, kept beside its log when the branch ends
run_controller  pauses, stops and sends messages to the candidates of a call
control_socket  the Unix socket through which another process asks for that
"""
