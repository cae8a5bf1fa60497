"""Where code that a model wrote runs: bubblewrap around a warm Python, and namespaces of its own for each program.

    program.py      what is asked for, and what came of it
    bubblewrap.py   the box's walls, and whether they can stand here
    seccomp.py      the system calls that programs may make
    groups.py       the kernel's bounds on a box, where it gives any
    inside/         what is inside the walls: zygote.py forks itself for each program, running.py is a program's side,
                    kernel.py what both ask of the kernel, main_module.py how a program is run, semaphores.py how it
                    waits for another process
    slot.py         one box from outside: it is asked, watched, and replaced
    pool.py         as many as there are cores, for many callers
    remote.py       in the boxes' place, a server that runs whole scripts: inside/sent.py is sent there
    told.py         what a program said becomes its outcome, wherever it ran
    values.py       plain values on their way in and out, and whether two are the same

What a program must not know (expected values, the verdict on it) stays outside: only its source, its standard input and
the arguments of its functions go in.
"""
