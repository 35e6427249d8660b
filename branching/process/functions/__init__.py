"""Python functions and their results, on the way into a sandbox and out of it.

function_pickle  functions and classes by value, as cloudpickle does it
result_channel   a function's value or exception, sent back
safe_unpickle    reads bytes that a sandbox sent, and makes nothing but data of them
"""
