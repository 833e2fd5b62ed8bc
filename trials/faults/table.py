"""The fault classes of the battery. A class is one entry: a trial function, or tests there are."""

from __future__ import annotations

from functools import partial

from trials.faults import disks, kills, resumes, stops, stores, values
from trials.faults.battery import FaultClass
from trials.faults.existing_tests import N_GENERATED, generated_configurations
from trials.faults.flipped_bits import AT_REST_LAYOUTS, a_flipped_bit
from trials.faults.hangs import GRID, a_rank_that_hangs
from trials.faults.offline import no_namespace, without_a_network
from trials.faults.power import a_power_loss
from trials.faults.several_nodes import a_fault_on_three_nodes, no_nodes
from trials.faults.slow_rank import a_slow_rank, busy_cores
from trials.faults.unwell_rank import an_unwell_rank

EQUAL = "equal"
"""The same command then gives the undisturbed run, bit for bit."""
WHOLE = f"checkpoints whole; {EQUAL}"
"""Every finished checkpoint verifies, and there is one if any was ever committed."""
FOUND = "found within 4 steps, nothing of it saved; or no effect"
"""By `train.check_every = 4`; no effect: what is saved is to the bit what it would have been."""
COPIED = f"on a machine that has nothing: {EQUAL}; no object is left over"

CLASSES = [
    FaultClass("C1", "SIGKILL before a file operation of a save", WHOLE, 120,
               kills.before_an_operation),
    FaultClass("C1a", "the same, saving beside training", WHOLE, 120,
               kills.before_an_operation_beside_training),
    FaultClass("C2", "SIGKILL at random moments, up to three times", WHOLE, 300,
               kills.at_a_random_moment),
    FaultClass("C3", "a worker under torchrun is killed", "a step within 15 s; equal losses", 50,
               kills.a_worker_under_torchrun),
    FaultClass("C4", "torchrun's agent is killed", f"workers leave within 30 s; {EQUAL}", 10,
               kills.the_agent_of_torchrun),
    FaultClass("C5", "power loss: what was not synced is lost", WHOLE, 100, a_power_loss),
    FaultClass("C6", "segmentation fault in C", WHOLE, 50, kills.segfault),
    FaultClass("C7", "out of memory: killed by the kernel", WHOLE, 50, kills.out_of_memory,
               obstacle=kills.no_memory_limit),
    FaultClass("S1", "stop signal in each phase, one rank or two",
               f"exit 75 within 10 s; {EQUAL}", 84, stops.first),
    FaultClass("S2", "second stop signal", f"out within 2 s; {WHOLE}", 10, stops.second),
    FaultClass("R1", "resumed in the same layout, 12 layouts", EQUAL, 36,
               resumes.in_the_same_layout),
    FaultClass("R2", "resumed in another layout, all pairs of 8",
               "state bit-equal when loaded; losses within 1e-5 for 10 steps", 56,
               resumes.in_another_layout),
    FaultClass("K1", "a file of a checkpoint is damaged",
               f"the one before it serves, or exit 65 naming the file; {EQUAL}", 120,
               disks.a_damaged_file),
    FaultClass("K2", "one flipped bit of a checkpoint", "refused", 20, disks.flipped_bits,
               n_cases=disks.FLIPS),
    FaultClass("D1", "a disk that refuses (ENOSPC, EIO, EDQUOT, EROFS, size limit)",
               f"a warning or exit 74; {WHOLE}", 34, disks.a_disk_that_refuses),
    FaultClass("D2", "a full disk", f"a warning or exit 74; {WHOLE}", 20, disks.a_full_disk,
               obstacle=disks.no_mount),
    FaultClass("D3", "a slow disk, and a kill there", WHOLE, 20, kills.on_a_slow_disk),
    FaultClass("N1", "NaN or infinity in loss, gradient, weight, logits",
               "nothing of it is kept, ranks agree; skipped, or exit 70", 32,
               values.a_value_that_is_not_finite),
    FaultClass("N2", "spike; resumed inside its window", "the same decision", tests=(
        "tests/train/faults/test_guard.py::"
        "test_a_run_stopped_after_each_step_of_the_window_decides_as_one_that_was_not",
        "tests/parity/test_guard.py",
    )),
    FaultClass("H1", "one of two ranks is stopped in a phase",
               "the other leaves within the timeout + 10 s, and names it", 10,
               stops.a_rank_that_stops),
    FaultClass("H2", "a rank stops, sleeps, spins in C or is killed, in 6 layouts and 5 places",
               "exit 70 within the timeout + 10 s; rank, step and collective named", len(GRID),
               a_rank_that_hangs),
    FaultClass("H3", "a slow rank: computes longer, shares its core, waits for its disk",
               "recorded and warned of", 20, a_slow_rank, obstacle=busy_cores),
    FaultClass("H4", "a rank with wrong products, memory or links",
               "exit 70 before the first step, naming it", 12, an_unwell_rank),
    FaultClass("B1", "one flipped bit in a weight, 5 layouts", FOUND, 100,
               partial(a_flipped_bit, fault="weight", layouts=AT_REST_LAYOUTS)),
    FaultClass("B2", "in the optimizer's state, 5 layouts", FOUND, 100,
               partial(a_flipped_bit, fault="moment", layouts=AT_REST_LAYOUTS)),
    FaultClass("B3", "in a summed gradient, data=2", FOUND, 100,
               partial(a_flipped_bit, fault="gradient")),
    FaultClass("B4", "in what a collective delivers to a rank, data=2", FOUND, 100,
               partial(a_flipped_bit, fault="message")),
    FaultClass("B5", "in a product, each time from a step on, data=2", FOUND, 100,
               partial(a_flipped_bit, fault="processor")),
    FaultClass("M1", "13 faults on three nodes: off, cut, bad links, back elsewhere, …",
               "the others go on; losses within 1e-10 of one process's", 200,
               a_fault_on_three_nodes, obstacle=no_nodes),
    FaultClass("M2", "the link between two nodes is cut for good",
               "both leave within the timeout + 10 s, and name whom they lost",
               tests=("tests/faults/test_two_nodes.py",), obstacle=no_nodes),
    FaultClass("M3", "workers killed while a launcher starts them again, as many or fewer",
               f"{EQUAL}; in another layout within 1e-10",
               tests=("tests/faults/test_membership.py",)),
    FaultClass("O1", "object store: SIGKILL before or after the n-th request", COPIED,
               2 * stores.MOST_REQUESTS, stores.killed_at_a_request),
    FaultClass("O2", "a fifth of its requests fails, in 8 ways", COPIED, 20,
               stores.failing_requests),
    FaultClass("O3", "SIGKILL at three requests in a row while a tenth fails", COPIED, 20,
               stores.killed_while_requests_fail),
    FaultClass("O4", "it answers nothing from some request on", f"exit 74; then {COPIED}", 20,
               stores.out_of_order),
    FaultClass("F1", "generated configurations, command lines and files",
               "a valid plan, or exit 2 naming the path", 4, generated_configurations,
               n_cases=N_GENERATED),
    FaultClass("F2", "malformed shards; random texts", "exit 65 naming file and place", tests=(
        "tests/data/test_shards.py", "tests/data/test_tokenizer.py",
    )),
    FaultClass("X1", "two runs in a folder, a stale lock, a reader meanwhile",
               f"one trains, the other leaves with 73; no half checkpoint is seen; {EQUAL}", 80,
               stops.the_folder),
    FaultClass("T1", "clock a day ahead, behind, jumping; random file times",
               f"the right checkpoint, no negative time; {EQUAL}", 12, values.a_wrong_clock),
    FaultClass("P1", "pickles, links and paths out of the folder; listening sockets",
               "nothing executed or written outside, loopback alone", tests=(
        "tests/checkpoint/test_checkpoint_damage.py::test_a_pickle_is_data_not_code",
        "tests/checkpoint/test_checkpoint_damage.py::test_a_manifest_cannot_lead_outside",
        "tests/checkpoint/test_sharded_damage.py::test_a_pickle_among_the_pieces_is_never_run",
        "tests/train/keep/test_run_folder.py",
        "tests/processes/launch/test_local_launch.py::"
        "test_workers_meet_over_loopback_and_leave_nothing",
    )),
    FaultClass("E1", "no network at all", "training, resuming, exporting, sampling pass", 6,
               without_a_network, obstacle=no_namespace),
]  # fmt: skip
