"""How the tests run each documented command. A command that is in none of these tables is run unchanged.

INSTEAD     takes long, or needs another machine: run this smaller command instead. Several commands may share one.
BY_TEST     another test runs the same on a small scale: file::function.
CANNOT      cannot run in a test, with the reason. Keep this table short.

`shrunk` reduces commands that train the example task, so they need no entry.
"""

from __future__ import annotations

TINY = (
    "mono.passes=3 mono.gaussians=1 tri.leaves=30 tri.passes=2 tri.gaussians=1 tri.splice=0 network.model=tiny network.hidden=16"
    " train.learners=1 train.epochs=0.5 scales=[0.1] dev_utterances=4 decode.beam=8"
)
DONE = f"roundelay run pipeline/mine {TINY} run=runs/mine --jobs 1"
"""The recipe of own-corpus.md, which is finished in every sandbox: all its stages are checked and skipped."""
PACKED = f"roundelay run pipeline/mine {TINY} network.packed=true run=runs/mine --until network --jobs 1"
THROUGHPUT = "python -m benchmarks.throughput --competitors adpsgd --batches 8 --cases even --rounds 1 --seconds 0.3 --json"
OVERHEAD = "python -m benchmarks.overhead --sizes 1M --repeats 1 --no-buffers --json"
LEARNING = "python -m benchmarks.learning --learners 2 --seeds 1 --competitors kstep --epochs 0.1 --json"
TORCHRUN = (
    "torchrun --standalone --nproc-per-node 2 -m roundelay train frames"
    " task_options.samples=256 task_options.held_out=64 epochs=1 batch=16 run=runs/under-torchrun"
)
TWO_HOSTS = (
    " & ".join(
        f"torchrun --nnodes 2 --node-rank {n} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port $PORT -m roundelay train"
        " frames bind_address=auto task_options.samples=256 task_options.held_out=64 epochs=1 batch=16 run=runs/two-hosts"
        for n in (0, 1)
    )
    + "; wait"
)
AVERAGING = "python -m benchmarks.averaging pipeline/mine runs/spoken network.hidden=16 --frames 500 --systems overlap --learners 1 --epochs 0.1 --no-wer --jobs 1 --json"
TIMING = "roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 steps=5 --json"
PLAN = "roundelay plan switchboard cluster=v100-8x8 samples=33860000 learners=4 --json"
VIRTUAL = "roundelay simulate {cluster} task=frames strategy=adpsgd learners=4 steps=5 task_options.samples=256"
FEEDING = "python -m benchmarks.feeding --quick --repeats 1 --json"
HOST = (
    "torchrun --nnodes 2 --node-rank {n} --nproc-per-node 2 --master-addr first --master-port 29500 -m roundelay train {rest}"
)

INSTEAD: dict[str, str] = {
    # engine
    **{HOST.format(n=n, rest="frames bind_address=auto run=/shared/runs/two epochs=2"): TWO_HOSTS for n in (0, 1)},
    "torchrun --standalone --nproc-per-node 2 -m roundelay train frames epochs=2 run=runs/tr": TORCHRUN,
    "torchrun --standalone --nproc-per-node 2 -m roundelay train frames run=runs/t": TORCHRUN,
    "torchrun --nproc-per-node 4 -m roundelay train frames 'strategy=hierarchical(adpsgd)'": TORCHRUN,
    "mpirun -n 2 python examples/join_any_module.py": (
        "mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 python examples/join_any_module.py"
    ),
    "cd examples && roundelay train frames strategy=my_strategy:Elastic strategy_options.tau=2 learners=2 epochs=1": (
        "cd examples && roundelay train frames strategy=my_strategy:Elastic strategy_options.tau=2 learners=2 epochs=1"
        " task_options.samples=256 task_options.held_out=64"
    ),
    # benchmarks
    "python -m benchmarks.throughput": THROUGHPUT,
    "python -m benchmarks.throughput --quick": THROUGHPUT,
    "python -m benchmarks.throughput --json > benchmarks/results/throughput.json": THROUGHPUT,
    "python -m benchmarks.throughput --competitors ddp,sync,adpsgd --batches 8 --cases slow --rounds 5": THROUGHPUT,
    "python -m benchmarks.throughput --competitors ddp,sync,adpsgd --cases even --seconds 15 --json": THROUGHPUT,
    "python -m benchmarks.overhead --json": OVERHEAD,
    "python -m benchmarks.overhead --json > benchmarks/results/overhead.json": OVERHEAD,
    "python -m benchmarks.overhead --sizes 1M --repeats 3 --no-buffers": OVERHEAD,
    "python -m benchmarks.learning": LEARNING,
    "python -m benchmarks.learning --quick": LEARNING,
    "python -m benchmarks.learning --json > benchmarks/results/learning.json": LEARNING,
    "python -m benchmarks.learning --competitors half,never,sync,kstep,bmuf,dpsgd,adpsgd,delay_by_one,hierarchical": LEARNING,
    "python -m benchmarks.feeding --json": FEEDING,
    "python -m benchmarks.feeding spoken runs/spoken": FEEDING,
    "python -m benchmarks.averaging spoken runs/spoken --json": AVERAGING,
    "python -m benchmarks.averaging spoken runs/spoken --seeds 3": AVERAGING,
    "python -m benchmarks.averaging spoken runs/spoken --systems overlap --optimizers sgd,ngsgd --seeds 3": AVERAGING,
    "python -m benchmarks.published_scaling": "python -m benchmarks.published_scaling --quick",
    "python -m benchmarks.theory": "python -m benchmarks.theory --quick",
    "python -m benchmarks.stragglers": "python -m benchmarks.stragglers --quick --slowdowns 10",
    "python -m benchmarks.ksteps": "python -m benchmarks.ksteps --quick --seeds 1",
    # virtual time
    "roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=200": (
        "roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=5"
    ),
    "roundelay simulate v100-8x8 strategy=sync samples=33860000 epochs=16": TIMING,
    "roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 --json": TIMING,
    "roundelay simulate p100-16 task=frames strategy=adpsgd": VIRTUAL.format(cluster="p100-16"),
    "roundelay simulate v100-4x8 task=frames strategy=adpsgd learners=4": VIRTUAL.format(cluster="v100-4x8"),
    "roundelay simulate my-cluster.toml task=frames strategy=adpsgd": VIRTUAL.format(cluster="my-cluster.toml"),
    "roundelay plan frames cluster=v100-8x8": "roundelay plan frames cluster=v100-8x8 learners=4",
    "roundelay plan switchboard cluster=v100-8x8 samples=33860000": PLAN,
    "roundelay plan switchboard cluster=v100-8x8 samples=33860000 --json": PLAN,
    "roundelay plan frames model=swb2000 samples=33860000 epochs=16 batch=128 cluster=my-cluster.toml --json": (
        "roundelay plan frames model=swb2000 samples=33860000 epochs=16 batch=128 cluster=my-cluster.toml learners=2 --json"
    ),
    # looking at runs
    "roundelay report runs/adpsgd runs/sync --out compared.html": (
        "roundelay report runs/frames-adpsgd-1 runs/k16 --out compared.html"
    ),
    # speech pipeline
    "roundelay synth my-speech rate=16000 train_speakers=24 train_utterances=600": "roundelay synth my-speech rate=16000"
    " train_speakers=4 train_utterances=80 dev_speakers=2 dev_utterances=10 test_speakers=2 test_utterances=10 lm_sentences=300 --jobs 1",
    "roundelay synth corpora/spoken": "roundelay synth corpora/spoken train_speakers=1 train_utterances=2 dev_speakers=1"
    " dev_utterances=1 test_speakers=1 test_utterances=1 lm_sentences=20 --jobs 1",
    "roundelay synth corpora/wide rate=16000 train_speakers=40 train_utterances=800": "roundelay synth corpora/wide rate=16000"
    " train_speakers=1 train_utterances=2 dev_speakers=1 dev_utterances=1 test_speakers=1 test_utterances=1 lm_sentences=20 --jobs 1",
    "roundelay run mine": f"roundelay run mine {TINY} --jobs 1",
    "roundelay run mine --until align": f"roundelay run mine {TINY} --until align --jobs 1",
    "roundelay run mine train.learners=4 train.strategy=kstep run=runs/mine-kstep": f"roundelay run mine {TINY} train.learners=4"
    " train.strategy=kstep run=runs/mine-kstep --until features --jobs 1",
    "roundelay run spoken16 --until network": DONE,
    """roundelay run spoken 'systems=["tri","sat"]' 'scales=[0.1,0.14,0.2]'""": DONE,
    "roundelay run spoken": DONE,
    "roundelay run spoken train.strategy=adpsgd train.learners=4 run=runs/spoken-adpsgd": DONE,
    "roundelay run spoken train.strategy=kstep train.learners=4 run=runs/kstep": DONE,
    "roundelay run spoken run=/shared/runs/spoken": DONE,
    "roundelay run spoken network.packed=true": PACKED,
    "roundelay run spoken network.packed=true train.strategy=kaldi_averaging train.learners=4"
    " train.strategy_options='{K = 600, best_first = 1, combine = 20, state = \"reset\"}' train.optimizer=ngsgd": (
        f"roundelay run pipeline/mine {TINY.replace('train.learners=1', 'train.learners=2')} network.packed=true"
        " train.strategy=kaldi_averaging train.strategy_options='{K = 2, best_first = 1, combine = 2, state = \"reset\"}'"
        " train.optimizer=ngsgd run=runs/mine --until network --jobs 1"
    ),
    HOST.format(
        n=0, rest="/shared/runs/spoken/network/config.toml run=/shared/runs/spoken/network resume=auto bind_address=auto"
    ): ("roundelay train runs/spoken/network/config.toml run=runs/spoken/network resume=auto bind_address=auto"),
    "roundelay export runs/spoken exported --onnx": "roundelay export runs/spoken exported-onnx --onnx --jobs 1",
    "roundelay export runs/mine exported --onnx": "roundelay export runs/mine exported --onnx --jobs 1",
}

NETWORK = "tests/benchmarks/test_network.py::test_ddp_and_gossip_between_two_machines"
HIERARCHY = "tests/benchmarks/test_network.py::test_a_machine_of_two_learners_sends_one_model_per_exchange"
EXAMPLE = "tests/api/test_examples.py::test_two_ranks_share_the_batches_of_join_any_module"
DEMO = "tests/recipes/test_demo.py::test_after_interrupts_the_same_command_continues_to_the_table"
COMPARE = "tests/recipes/test_compare.py::test_the_command_prints_tables_and_json"
MPIRUN = "tests/comm/test_mpi_backend.py::test_a_run_under_mpirun_succeeds_on_any_backend"
MPI_MACHINES = "tests/comm/test_mpi_machines.py::test_the_ranks_are_on_two_machines"
JOBS = "tests/benchmarks/test_job_per_iteration.py::test_jobs_ramp_up_and_see_every_example_once"
BENCH_THROUGHPUT = "tests/bench/test_bench.py::test_throughput_measures_every_competitor"
BENCH_NETWORK = "tests/bench/test_bench.py::test_network_measures_local_learners"
CALIBRATE = "tests/bench/test_bench.py::test_calibrate_writes_a_cluster_of_this_machine"

BY_TEST: dict[str, str] = {
    "roundelay bench throughput": BENCH_THROUGHPUT,
    "roundelay bench throughput --quick": BENCH_THROUGHPUT,
    "roundelay bench throughput frames learners=4": BENCH_THROUGHPUT,
    "roundelay bench network": BENCH_NETWORK,
    "roundelay bench network --quick": BENCH_NETWORK,
    "roundelay bench network learners=4": BENCH_NETWORK,
    "roundelay calibrate --out here.toml": CALIBRATE,
    "python -m benchmarks.network": NETWORK,
    "python -m benchmarks.network --competitors ddp,ddp_fp16,kstep,adpsgd,adpsgd_half --json": NETWORK,
    "sudo python -m benchmarks.network --quick": NETWORK,
    "sudo python -m benchmarks.network --json > benchmarks/results/network.json": NETWORK,
    "python -m benchmarks.network --hierarchy --json": HIERARCHY,
    "sudo python -m benchmarks.network --hierarchy --json > benchmarks/results/hierarchy.json": HIERARCHY,
    "torchrun --standalone --nproc-per-node 2 examples/join_any_module.py": EXAMPLE,
    "torchrun --nproc-per-node 4 script.py": EXAMPLE,
    "roundelay demo": DEMO,
    "roundelay demo --out demo-even train.straggler=": DEMO,
    "roundelay demo --out demo-even train.straggler= --json": DEMO,
    "roundelay demo --out demo-four train.learners=4 train.batch=8 train.straggler=3:4.0": DEMO,
    "roundelay compare runs/sync-0 runs/sync-1 runs/adpsgd-0 runs/adpsgd-1": COMPARE,
    "roundelay compare runs/* --json": COMPARE,
    "roundelay plan --what-if runs/frames-sync-1 rank=7": "tests/simulate/test_plan.py::test_what_if_a_rank_were_normal",
    "roundelay check learners=2 run=runs/next": "tests/preflight/test_check.py::test_local_learners_measure_their_link",
    "torchrun --nnodes 2 --node-rank 0 --master-addr first --master-port 29500 -m roundelay check bind_address=auto": (
        "tests/preflight/test_check.py::test_under_torchrun_rank_0_reports_for_all_ranks"
    ),
    "mpirun -n 2": MPIRUN,
    "mpirun -n 4 roundelay train frames backend=mpi strategy=kstep": MPIRUN,
    "mpirun -n 4 roundelay train frames backend=mpi strategy=kstep epochs=2 run=runs/mpi": MPIRUN,
    "mpirun -n 4 roundelay train frames backend=auto epochs=2": MPIRUN,
    "mpirun -n 4 --hostfile hosts roundelay train frames backend=mpi bind_address=auto run=/shared/runs/four epochs=2": MPI_MACHINES,
    "roundelay pack features=feats.scp+ivectors.scp alignments=runs/x/alignments/train archives/x context=10": (
        "tests/data/test_archive.py::test_the_command_packs_and_verifies"
    ),
    "python benchmarks/job_per_iteration.py run archives/spoken runs/spoken/lstm out --steps 100 --jobs-initial 1 --jobs-final 4": JOBS,
}

RECORDINGS = "needs recordings that are not in the repository; where they exist, tests/recipes/test_pipeline.py runs a small recipe on them"
SLURM = "needs a Slurm cluster; its variables: tests/launch/test_environment.py"
FAULTS = "kills and reaps every process below its own for minutes; single faults: tests/engine/test_kills.py, test_finishing.py"

CANNOT: dict[str, str] = {
    "roundelay run digits": RECORDINGS,
    "roundelay run digits --until align": RECORDINGS,
    "roundelay run commands": RECORDINGS,
    "roundelay run speechocean762": RECORDINGS,
    "git clone … && cd roundelay": "needs the network and an address",
    "sbatch train.sbatch": "needs a Slurm cluster; test_the_slurm_script_on_one_machine runs the script",
    "squeue --me": "needs a Slurm cluster",
    "srun --ntasks 4 --kill-on-bad-exit=1 roundelay train frames bind_address=auto run=/shared/runs/a epochs=2": SLURM,
    "srun --ntasks 4 --mpi=pmix roundelay train frames backend=mpi bind_address=auto run=/shared/runs/b epochs=2": SLURM,
    "mpirun -n 2 python benchmarks/mpi_one_sided.py": "takes a minute; the operations: test_one_sided_operations_lose_nothing",
    "pip install 'roundelay[mpi]'": "needs the network",
    "pip install 'roundelay[speech]'": "needs the network",
    "pip install --no-binary mpi4py mpi4py": "needs the network and the MPI of a cluster",
    "tensorboard --logdir runs": "serves until it is stopped; what it reads: tests/metrics/test_tensorboard.py",
    "python -m benchmarks.batches": "takes hours, and minutes with --quick",
    "python -m benchmarks.batches --keep batches.jsonl --jobs 2": "as above",
    "python -m benchmarks.calibrate --check": "takes many minutes; parts: tests/benchmarks/test_calibrate.py",
    "tail -f slurm-12345.txt": "follows a file until it is stopped",
    "python -m benchmarks.kill_matrix --most 130 --json": FAULTS,
    "python -m benchmarks.kill_calls --json": FAULTS,
    "python -m benchmarks.kill_calls --ranks 2 --second --json": FAULTS,
    "python -m benchmarks.frozen --json": FAULTS,
    "sudo python -m benchmarks.network_faults --json": FAULTS,
    "python -m benchmarks.time_sliced --learners 4,8 --runs 5 --json": "takes ten minutes",
    "python -m benchmarks.straggler_tail --json": FAULTS,
    "python -m benchmarks.many_learners --learners 16,32,64,128 --json": FAULTS,
    "python -m benchmarks.fuzz 20000": "takes minutes; a part of it: tests/fuzz/test_fuzz.py",
    "sudo python -m benchmarks.overhead --link 1000 --sizes 1M,10M": "shapes links as root for minutes; its links: test_network.py",
}


def shrunk(text: str) -> str:
    """Return a command that trains the example task with fewer samples, and with threads unless it asks for another backend.

    Commands of the speech pipeline get --jobs 1: starting processes takes longer than their work here.
    """
    if (
        text.split()[:2] in [["roundelay", verb] for verb in ("prepare", "align", "decode", "export", "pack")]
        and "--help" not in text
    ):
        return f"{text} --jobs 1"
    if not text.startswith(("roundelay train frames", "roundelay train examples/", "RANK=")):
        return text
    if text.startswith("RANK="):
        small = "task_options.samples=256 task_options.held_out=64 batch=16"
        return text.replace(" epochs=", f" {small} epochs=").replace("29519", "$PORT")
    small = [] if "spirals" in text else ["task_options.samples=256", "task_options.held_out=64"]
    if "epochs=" not in text:
        small.append("epochs=1")
    if "backend=" not in text and "hostname" not in text:
        small.append("backend=threads")
    head, flag, tail = text.partition(" --")  # settings come before options
    return " ".join([head, *small]) + flag + tail
