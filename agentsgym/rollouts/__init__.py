"""Play many trials concurrently; here, a trial is a generator that yields requests and receives actions.

::

    driver.py            drive(): the entry point; calling the agent for a batch of requests, or concurrently;
                         TrialStream: a run in its own thread, to which trials are added while it runs
    scheduler.py         the main loop: which trial is advanced or answered next, time limits; and its types: trials,
                         inputs and outcomes, executors, agent callers
    thread_pool.py       EnvThreadPool: environments in threads of this process
    process_pool.py      EnvProcessPool: environments in worker processes
    process_executor.py  one run in a process pool: messages, replays after a crash, and which trial caused it
    worker_set.py        the processes of a pool, their limits, their trials, and which trial causes one to die
    workers/             a worker process
        handle.py        the pool's handle to it: start, send, measure, kill
        main.py          the code that runs in it; it exits when its owner exits, and fork_server.py gives it time to
        wire.py          the messages between the two, checked, so that stray bytes are never unpickled
"""
