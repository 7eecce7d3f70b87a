"""What carries messages between state machines: in one process on a virtual clock, over pyzmq, in shared memory."""
