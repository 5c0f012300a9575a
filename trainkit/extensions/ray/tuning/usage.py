"""What `tune` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "conf=NAME search.KEY=FUNCTION(...) [search.NAME=VALUE ...] [key=value ...]",
    "Search for the best settings of a config with Ray Tune, on the cluster of RAY_ADDRESS or on"
    " this host; print a table of the trials and the command of the best one. Functions: uniform,"
    " loguniform, quniform, randint, lograndint, normal, choice, grid.",
    (
        (
            "search.num_samples",
            "int",
            "8; 1 if all keys are grids",
            "trials; with grid(...) so many for each of its combinations",
        ),
        (
            "search.metric",
            "NAME",
            "what a callback of the config monitors",
            "the logged value that compares trials",
        ),
        ("search.mode", "min | max", "as that callback", "which value is best"),
        (
            "search.scheduler",
            "asha | pbt | none",
            "asha",
            "asha ends bad trials early, pbt copies good ones over bad ones",
        ),
        ("search.max_concurrent", "int", "as the resources allow", "trials at a time"),
        ("search.num_workers", "int", "1", "ranks of a trial"),
        ("search.resources", "{CPU: 1}", "{CPU: 1}", "of each rank"),
        ("search.seed", "int", "0", "of the draws"),
        ("search.grace_period", "int", "1", "epochs that asha leaves each trial"),
        (
            "search.reduction_factor",
            "int",
            "3",
            "asha continues one of so many trials at each look",
        ),
        (
            "search.interval",
            "int",
            "1",
            "epochs between two exchanges of pbt; of a run that steps limit each validation",
        ),
        (
            "run_dir",
            "FOLDER",
            "runs/<conf>/<date_time>",
            "the search's folder; shared by all nodes of a cluster",
        ),
    ),
    (
        "conf=mlp 'search.optimizer.lr=loguniform(1e-4,1e-1)' search.num_samples=8",
        (
            "conf=mlp 'search.optimizer=choice(sgd,adamw)' search.scheduler=none"
            " 'search.resources={CPU: 2, GPU: 1}'"
        ),
    ),
    takes_config=True,
)
