"""How each documented command is run by the tests. A command in none of these tables is run as it stands.

INSTEAD     it takes long, or needs a machine that is not here: the same thing, smaller. Several may share one.
BY_TEST     another test runs the same thing, small: file::function.
CANNOT      it cannot run in a test at all, and why. Keep this one short.

Commands that train the example task are made small by `shrunk` and need no line.
"""

from __future__ import annotations

TINY = (
    "mono.passes=3 mono.gaussians=1 tri.leaves=30 tri.passes=2 tri.gaussians=1 tri.splice=0 network.model=tiny network.hidden=16"
    " train.learners=1 train.epochs=0.5 scales=[0.1] dev_utterances=4 decode.beam=8"
)
DONE = f"roundelay run road/mine {TINY} run=runs/mine --jobs 1"
"""The recipe of own-corpus.md, which every sandbox finds done: all its stages are checked and skipped."""
PACKED = f"roundelay run road/mine {TINY} network.packed=true run=runs/mine --until network --jobs 1"
THROUGHPUT = "roundelay bench throughput --contestants adpsgd --batches 8 --cases even --rounds 1 --seconds 0.3 --json"
OVERHEAD = "roundelay bench overhead --sizes 1M --repeats 1 --no-buffers --json"
LEARNING = "roundelay bench learning --learners 2 --seeds 1 --contestants kstep --epochs 0.1 --json"
ROAD = "roundelay bench road runs/spoken --repeats 1 --utterances 2 --json"
SPEECH = "roundelay bench speech road/mine runs/spoken network.hidden=16 --learners 2 --seeds 1 --strategies adpsgd --epochs 0.1 --jobs 1 --json"
TORCHRUN = (
    "torchrun --standalone --nproc-per-node 2 -m roundelay train examples/frames.toml"
    " task_options.samples=256 task_options.held_out=64 epochs=1 batch=16 run=runs/under-torchrun"
)
TWO_HOSTS = (
    " & ".join(
        f"torchrun --nnodes 2 --node-rank {n} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port $PORT -m roundelay train"
        " examples/frames.toml bind_address=auto task_options.samples=256 task_options.held_out=64 epochs=1 batch=16 run=runs/two-hosts"
        for n in (0, 1)
    )
    + "; wait"
)
AVERAGING = "roundelay bench averaging road/mine runs/spoken network.hidden=16 --frames 500 --systems overlap --learners 1 --epochs 0.1 --no-wer --jobs 1 --json"
CALIBRATE = "roundelay bench calibrate --out here.toml --seconds 0.2 --repeats 1 --json"
TIMING = "roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 steps=5 --json"
PLAN = "roundelay plan recipes/switchboard cluster=v100-8x8 samples=33860000 learners=4 --json"
VIRTUAL = "roundelay simulate {cluster} task=examples/frames.toml strategy=adpsgd learners=4 steps=5 task_options.samples=256"
FEEDING = "roundelay bench feeding --quick --repeats 1 --json"
HOST = (
    "torchrun --nnodes 2 --node-rank {n} --nproc-per-node 2 --master-addr first --master-port 29500 -m roundelay train {rest}"
)

INSTEAD: dict[str, str] = {
    # the engine
    **{
        HOST.format(n=n, rest="examples/frames.toml bind_address=auto run=/shared/runs/two epochs=2"): TWO_HOSTS for n in (0, 1)
    },
    "torchrun --standalone --nproc-per-node 2 -m roundelay train examples/frames.toml epochs=2 run=runs/tr": TORCHRUN,
    "torchrun --standalone --nproc-per-node 2 -m roundelay train examples/frames.toml run=runs/t": TORCHRUN,
    "torchrun --nproc-per-node 4 -m roundelay train examples/frames.toml 'strategy=hierarchical(adpsgd)'": TORCHRUN,
    "mpirun -n 2 python examples/join_any_module.py": (
        "mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 python examples/join_any_module.py"
    ),
    # benchmarks
    "roundelay bench throughput": THROUGHPUT,
    "roundelay bench throughput --quick": THROUGHPUT,
    "roundelay bench throughput --json > benchmarks/results/throughput.json": THROUGHPUT,
    "roundelay bench throughput --contestants ddp,sync,adpsgd --batches 8 --cases slow --rounds 5": THROUGHPUT,
    "roundelay bench throughput --contestants ddp,sync,adpsgd --batches 8,64 --rounds 5 --json": THROUGHPUT,
    "roundelay bench throughput --contestants ddp,sync,adpsgd --cases even --seconds 15 --json": THROUGHPUT,
    "roundelay bench overhead": OVERHEAD,
    "roundelay bench overhead --json": OVERHEAD,
    "roundelay bench overhead --json > benchmarks/results/overhead.json": OVERHEAD,
    "roundelay bench overhead --sizes 1M --json": OVERHEAD,
    "roundelay bench overhead --sizes 1M --repeats 3 --no-buffers": OVERHEAD,
    "roundelay bench learning": LEARNING,
    "roundelay bench learning --quick": LEARNING,
    "roundelay bench learning --json > benchmarks/results/learning.json": LEARNING,
    "roundelay bench learning --learners 4 --seeds 1": LEARNING,
    "roundelay bench learning --contestants half,never,sync,kstep,bmuf,dpsgd,adpsgd,delay_by_one,hierarchical": LEARNING,
    "roundelay bench road runs/spoken --json": ROAD,
    "roundelay bench speech recipes/spoken runs/spoken --json": SPEECH,
    "roundelay bench speech recipes/spoken runs/spoken network.hidden=96 train.epochs=3 --strategies adpsgd,sync": SPEECH,
    "roundelay bench feeding --json": FEEDING,
    "roundelay bench feeding recipes/spoken runs/spoken": FEEDING,
    "roundelay bench averaging recipes/spoken runs/spoken --json": AVERAGING,
    "roundelay bench averaging recipes/spoken runs/spoken network.hidden=96 --repeats 3 --no-wer": AVERAGING,
    "roundelay bench averaging recipes/spoken runs/spoken --seeds 3": AVERAGING,
    "roundelay bench averaging recipes/spoken runs/spoken --systems overlap --optimizers sgd,ngsgd --seeds 3": AVERAGING,
    "roundelay bench shapes": "roundelay bench shapes --quick",
    "roundelay bench shapes --quick": "roundelay bench shapes --quick",
    "roundelay bench theory": "roundelay bench theory --quick",
    "roundelay bench theory --quick": "roundelay bench theory --quick",
    "roundelay bench stragglers": "roundelay bench stragglers --quick --slowdowns 10",
    "roundelay bench stragglers --quick": "roundelay bench stragglers --quick --slowdowns 10",
    "roundelay bench ksteps": "roundelay bench ksteps --quick --seeds 1",
    "roundelay bench ksteps --quick": "roundelay bench ksteps --quick --seeds 1",
    # virtual time
    "roundelay bench calibrate --out here.toml --check": CALIBRATE,
    "roundelay bench calibrate --out here.toml": CALIBRATE,
    "roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=200": (
        "roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=5"
    ),
    "roundelay simulate v100-8x8 strategy=sync samples=33860000 epochs=16": TIMING,
    "roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 --json": TIMING,
    "roundelay simulate p100-16 task=examples/frames.toml strategy=adpsgd": VIRTUAL.format(cluster="p100-16"),
    "roundelay simulate my-cluster.toml task=examples/frames.toml strategy=adpsgd learners=4": VIRTUAL.format(
        cluster="p100-16"
    ),
    "roundelay simulate my-cluster.toml task=examples/frames.toml strategy=adpsgd": VIRTUAL.format(cluster="my-cluster.toml"),
    "roundelay plan examples/frames.toml cluster=v100-8x8": "roundelay plan examples/frames.toml cluster=v100-8x8 learners=4",
    "roundelay plan recipes/switchboard cluster=v100-8x8 samples=33860000": PLAN,
    "roundelay plan recipes/switchboard cluster=v100-8x8 samples=33860000 --json": PLAN,
    "roundelay plan examples/frames.toml model=swb2000 samples=33860000 epochs=16 batch=128 cluster=my-cluster.toml --json": (
        "roundelay plan examples/frames.toml model=swb2000 samples=33860000 epochs=16 batch=128 cluster=my-cluster.toml learners=2"
        " --json"
    ),
    # looking at runs
    "roundelay report runs/adpsgd runs/sync --out compared.html": (
        "roundelay report runs/frames-adpsgd-1 runs/k16 --out compared.html"
    ),
    "roundelay completion bash > ~/.local/share/bash-completion/completions/roundelay": "roundelay completion bash > bash.txt",
    "source <(roundelay completion zsh)": "roundelay completion zsh > zsh.txt",
    "roundelay completion fish > ~/.config/fish/completions/roundelay.fish": "roundelay completion fish > fish.txt",
    # the speech road
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
    "roundelay run recipes/spoken16 --until network": DONE,
    """roundelay run recipes/spoken 'systems=["tri","sat"]' 'scales=[0.1,0.14,0.2]'""": DONE,
    "roundelay run recipes/spoken": DONE,
    "roundelay run recipes/spoken train.strategy=adpsgd train.learners=4 run=runs/spoken-adpsgd": DONE,
    "roundelay run recipes/spoken train.strategy=kstep train.learners=4 run=runs/kstep": DONE,
    "roundelay run recipes/spoken run=/shared/runs/spoken": DONE,
    "roundelay run recipes/spoken network.packed=true": PACKED,
    "roundelay run recipes/spoken network.packed=true train.strategy=kstep train.learners=4"
    " train.strategy_options='{K = 600, best_first = 1, combine = 20, state = \"forget\"}' train.optimizer=ngsgd": (
        f"roundelay run road/mine {TINY.replace('train.learners=1', 'train.learners=2')} network.packed=true"
        " train.strategy=kaldi_averaging train.strategy_options='{K = 2, best_first = 1, combine = 2, state = \"reset\"}'"
        " train.optimizer=ngsgd run=runs/mine --until network --jobs 1"
    ),
    HOST.format(
        n=0, rest="/shared/runs/spoken/network/task.toml run=/shared/runs/spoken/network resume=auto bind_address=auto"
    ): ("roundelay train runs/spoken/network/task.toml run=runs/spoken/network resume=auto bind_address=auto"),
    "roundelay export runs/spoken exported --onnx": "roundelay export runs/spoken exported-onnx --onnx --jobs 1",
    "roundelay export runs/mine exported --onnx": "roundelay export runs/mine exported --onnx --jobs 1",
}

NETWORK = "tests/benchmarks/test_network.py::test_ddp_and_gossip_between_two_machines"
HIERARCHY = "tests/benchmarks/test_network.py::test_a_machine_of_two_learners_sends_one_model_per_meeting"
EXAMPLE = "tests/api/test_examples.py::test_join_any_module_on_two_learners_shares_the_batches"
DEMO = "tests/recipes/test_demo.py::test_after_interrupts_the_same_command_goes_on_to_the_table"
COMPARE = "tests/recipes/test_compare.py::test_the_command_prints_tables_and_json"
MPIRUN = "tests/comm/test_mpi.py::test_a_run_under_mpirun_ends_well_on_any_wire"
MPI_MACHINES = "tests/comm/test_mpi_machines.py::test_the_learners_are_on_two_machines"
JOBS = "tests/benchmarks/test_job_per_iteration.py::test_jobs_ramp_up_and_see_every_example_once"

BY_TEST: dict[str, str] = {
    "roundelay bench network": NETWORK,
    "roundelay bench network --contestants ddp,ddp_fp16,kstep,adpsgd,adpsgd_half --json": NETWORK,
    "sudo roundelay bench network --quick": NETWORK,
    "sudo roundelay bench network --json > benchmarks/results/network.json": NETWORK,
    "roundelay bench network --hierarchy --json": HIERARCHY,
    "sudo roundelay bench network --hierarchy --json": HIERARCHY,
    "sudo roundelay bench network --hierarchy --json > benchmarks/results/hierarchy.json": HIERARCHY,
    "torchrun --standalone --nproc-per-node 2 examples/join_any_module.py": EXAMPLE,
    "torchrun --nproc-per-node 4 script.py": EXAMPLE,
    "roundelay demo": DEMO,
    "roundelay demo --out demo-even train.slow= --json": DEMO,
    "roundelay compare runs/sync-0 runs/sync-1 runs/adpsgd-0 runs/adpsgd-1": COMPARE,
    "roundelay compare runs/* --json": COMPARE,
    "roundelay plan --what-if runs/frames-sync-1 rank=7": "tests/simulate/test_plan.py::test_what_if_a_rank_were_normal",
    "roundelay check learners=2 run=runs/next": "tests/preflight/test_check.py::test_local_learners_measure_what_lies_between_them",
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr first --master-port 29500 -m roundelay check bind_address=auto": (
        "tests/preflight/test_check.py::test_under_torchrun_rank_0_speaks_for_all"
    ),
    "mpirun -n 4 roundelay train examples/frames.toml backend=mpi strategy=kstep": MPIRUN,
    "roundelay demo --out demo-even train.slow=": DEMO,
    "roundelay demo --out demo-four train.learners=4 train.batch=8 train.slow=3:4.0": DEMO,
    "mpirun -n 2": MPIRUN,
    "mpirun -n 4 roundelay train examples/frames.toml backend=mpi strategy=kstep epochs=2 run=runs/mpi": MPIRUN,
    "mpirun -n 4 roundelay train examples/frames.toml backend=auto epochs=2": MPIRUN,
    "mpirun -n 4 --hostfile hosts roundelay train examples/frames.toml backend=mpi bind_address=auto run=/shared/runs/four epochs=2": MPI_MACHINES,
    "roundelay pack features=feats.scp+ivectors.scp alignments=runs/x/alignments/train archives/x context=10": (
        "tests/data/test_archive.py::test_the_command_packs_verifies_and_tells"
    ),
    "python benchmarks/job_per_iteration.py run archives/spoken runs/spoken/lstm out --steps 100 --jobs-initial 1 --jobs-final 4": JOBS,
}

RECORDINGS = "needs recordings that are not in the repository; where they are, tests/recipes/test_pipeline.py runs a small recipe on them"
SLURM = "needs a Slurm cluster; its variables: tests/launch/test_environment.py"
CANNOT: dict[str, str] = {
    "roundelay run recipes/digits": RECORDINGS,
    "roundelay run recipes/digits --until align": RECORDINGS,
    "roundelay run recipes/commands": RECORDINGS,
    "roundelay run recipes/speechocean762": RECORDINGS,
    "git clone … && cd roundelay": "needs the network and an address",
    "sbatch train.sbatch": "needs a Slurm cluster; the script itself is run by test_the_slurm_script_on_one_machine",
    "squeue --me": "needs a Slurm cluster",
    "srun --ntasks 4 --kill-on-bad-exit=1 roundelay train examples/frames.toml bind_address=auto run=/shared/runs/a epochs=2": SLURM,
    "srun --ntasks 4 --mpi=pmix roundelay train examples/frames.toml backend=mpi bind_address=auto run=/shared/runs/b epochs=2": SLURM,
    "mpirun -n 2 python benchmarks/mpi_one_sided.py": "a measurement of a minute; the verbs: test_one_sided_verbs_lose_nothing",
    "pip install 'roundelay[mpi]'": "needs the network",
    "pip install --no-binary mpi4py mpi4py": "needs the network and a cluster's own MPI",
    "tensorboard --logdir runs": "serves until it is stopped; what it reads: tests/metrics/test_tensorboard.py",
    "roundelay bench batches": "takes hours, and minutes with --quick",
    "roundelay bench batches --keep batches.jsonl --jobs 2": "as above",
    "sudo roundelay bench calibrate --links 1000,200 --check": "shapes links as root for minutes; its cables: test_network.py",
    "sudo roundelay bench calibrate --links 1000,200 --check --seconds 6 --json": "as above",
    "tail -f slurm-12345.txt": "follows a file until it is stopped",
    "sudo roundelay bench overhead --link 1000 --sizes 1M,10M": "shapes links as root for minutes; its cables: test_network.py",
    "sudo roundelay bench overhead --link 1000 --sizes 10M": "as above",
    "sudo roundelay bench overhead --link 1000 --json": "as above",
}


def shrunk(text: str) -> str:
    """The example task, small: fewer samples, and learners as threads where the command does not ask for more. The speech
    road in this process: starting others takes longer than the work."""
    if (
        text.split()[:2] in [["roundelay", verb] for verb in ("prepare", "align", "decode", "export", "pack")]
        and "--help" not in text
    ):
        return f"{text} --jobs 1"
    if not text.startswith(("roundelay train examples/", "RANK=")):
        return text
    if text.startswith("RANK="):
        small = "task_options.samples=256 task_options.held_out=64 batch=16"
        return text.replace(" epochs=", f" {small} epochs=").replace("29519", "$PORT")
    small = [] if "spirals" in text else ["task_options.samples=256", "task_options.held_out=64"]
    if "epochs=" not in text:
        small.append("epochs=1")
    if "backend=" not in text and "hostname" not in text:
        small.append("backend=threads")
    head, flag, tail = text.partition(" --")  # settings stand before options
    return " ".join([head, *small]) + flag + tail
