"""The ledger of costs: what a piece of code costs on one rank, and what one rank of many would cost on a GPU that is not there.

What a user needs, one file each:
    ledger.py           count_costs, Ledger, Costs
    simulate_rank.py    simulate_rank
    cost_rules.py       register_cost; kernels, FLOPs and bytes of one op, by torch's FLOP registry and rules of our own
    hardware.py         Hardware, ModelledTime: a model of the time, with its constants
    host_syncs.py       HostSync, HostSyncError: which ops make the CPU wait for the device

What they stand on:
    memory.py           the bytes that are alive, by what they are for
    fake_values.py      what an op returns that would need data; known_values follows integers
    fake_device.py      what torch.cuda answers, and which attention kernel runs
    autograd_engine.py  backward, since torch's own engine needs a real device
    distributed_data_parallel.py    DDP's buckets and all_reduces, since its reducer in C++ needs real tensors
"""
