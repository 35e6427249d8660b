"""Logs of running calls, and their control from other processes.

run_log         output, state and result of each candidate, in the store
patches         the patch of each branch, saved beside its log when the branch ends
run_controller  pauses, stops and sends messages to the candidates of a call
control_socket  the Unix socket through which another process requests this
"""
