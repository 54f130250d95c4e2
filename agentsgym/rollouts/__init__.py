"""Play many trials at once; a trial is known only as a generator that yields requests and receives actions.

::

    driver.py          drive(): the entry point; plays in lockstep where nothing has to be waited for
    scheduler.py       the main loop of every other run: which trial is advanced or answered next, time limits
    interfaces.py      what the parts exchange: trials, inputs and outcomes, executors, pools, agent callers
    agent_calls.py     calling the agent: once for a batch of requests, or concurrently with coroutines
    thread_pool.py     EnvThreadPool: environments in threads of this process
    process_pool.py    EnvProcessPool: environments in worker processes, and replays after a crash
    worker_handle.py   one worker process as the pool sees it: start, send, kill
    worker_main.py     what runs inside a worker process
    wire.py            the messages between the two
"""
