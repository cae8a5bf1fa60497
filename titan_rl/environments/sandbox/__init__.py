"""Sandbox for model-written code: bubblewrap around a warm Python, and new namespaces for each program.

    program.py      program, limits, outcome
    bubblewrap.py   the box's walls, and whether they can stand here
    box_process.py  the process behind the walls, and the socket to it
    seccomp.py      the system calls that programs may make
    groups.py       the kernel's bounds on a box, where it gives any
    inside/         what is inside the walls: zygote.py forks itself for each program, running.py is a program's side,
                    kernel.py what both ask of the kernel, main_module.py how a program is run, semaphores.py how it
                    waits for another process
    slot.py         one box from outside: given programs, watched, and replaced
    pool.py         as many as there are cores, for many callers
    remote.py       in the boxes' place, a server that runs whole scripts: inside/remote_program.py is sent there
    program_report.py  a program's output becomes its outcome, wherever it ran
    workspace/      in a program's place, a file system in which an agent's commands run; inside/workspaces.py makes it
                    of layers (inside/mounts.py)
    values.py       plain values on their way in and out, and whether two are the same

What a program must not know (expected values, the verdict on it) stays outside: only its source, its standard input and
the arguments of its functions go in.
"""
