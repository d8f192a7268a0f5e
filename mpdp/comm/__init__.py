"""Communicators: how arrays move between ranks.

This package knows arrays, ranks and sockets, and nothing of tensors, models or optimizers.
``base`` is the interface and its checks, ``solo`` a world of one, ``mpi`` host buffers over MPI, ``direct`` the
algorithm over memory that ranks share, with its mappings ``shared_memory`` and ``thread_memory``; ``two_level`` joins
nodes, with ``owners``; ``nodes`` says who is on which; ``choose`` takes one;
``agreement`` the small exchanges by which ranks agree before one of them raises; ``meeting`` and ``liveness`` are the
sockets on which ranks watch each other, and need no MPI. Nothing is imported here: the guard needs ``activity`` alone.
"""
