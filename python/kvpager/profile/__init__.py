"""What the scheduler costs, and where: steady loads, phases, allocations, instructions, the interpreter.

`load` drives a scheduler without a model, `measure` takes the times, `interpreter` adds busy threads,
`instructions` counts in a child process, `trace_events` writes what a viewer opens,
`vllm_scheduler` is the peer beside it.
"""
