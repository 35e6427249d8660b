"""Interfaces to the Linux kernel. Imports nothing from the layers above.

syscalls    system calls that the standard library lacks, by ctypes
mountinfo   the mount table (/proc/self/mountinfo)
fd_passing  file descriptors over a Unix socket (SCM_RIGHTS)
memory      mappings of this process (/proc/self/maps, mmap)
rlimits     the limit on open files (RLIMIT_NOFILE)
"""
