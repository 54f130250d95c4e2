"""Play many trials at once; a trial is known only as a generator that yields requests and receives actions.

::

    driver.py            drive(): the entry point; plays in lockstep where nothing has to be waited for
    scheduler.py         the main loop of every other run: which trial is advanced or answered next, time limits
    stream.py            TrialStream: a run in its own thread, to which trials are added while it runs
    interfaces.py        types that the parts exchange: trials, inputs and outcomes, executors, agent callers
    agent_calls.py       calling the agent: once for a batch of requests, or concurrently with coroutines
    thread_pool.py       EnvThreadPool: environments in threads of this process
    process_pool.py      EnvProcessPool: environments in worker processes
    process_executor.py  one run in them: messages, replays after a crash, and which trial caused it
    remote_trial.py      one trial in a worker process as the pool sees it
    worker_set.py        the processes of a pool, their limits, and which trial lives in which
    workers/             one of them
        handle.py        as the pool sees it: start, send, kill
        main.py          the code that runs in it
        owner_watch.py   ends it with its owner; fork_server.py gives it time to
        wire.py          the messages between the two
        channel.py       how they travel: checked, so that stray bytes are never unpickled
        memory.py        how much it holds
"""
