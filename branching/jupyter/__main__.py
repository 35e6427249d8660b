"""Starts the kernel: what Jupyter executes. See `branching kernel`."""

from ipykernel.kernelapp import IPKernelApp

from branching.jupyter.kernel import SessionKernel

if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=SessionKernel, capture_fd_output=False)
