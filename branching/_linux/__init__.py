"""What talks to the Linux kernel; it imports nothing of the layers above.

syscalls    system calls that the standard library lacks, by ctypes
mountinfo   what is mounted where (/proc/self/mountinfo)
fd_passing  file descriptors over a Unix socket (SCM_RIGHTS)
rlimits     how many files this program and its children may have open (RLIMIT_NOFILE)
"""
