"""The files of images: what they copy is there, their versions are the project's,
and their user is not root.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.helpers.pages import blocks, part
from trainkit.extensions.doctor.software import PYTHONS
from trainkit.extensions.horovod_build.options import parser
from trainkit.extensions.horovod_build.pip import RUNTIME_NEEDS, VERSION

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "launchers.md"
FILES = [ROOT / "Dockerfile", ROOT / ".devcontainer" / "Dockerfile"]
Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile: keyword, and the rest as one line."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in whole]


def stages(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each stage by "name FROM base";
    those before the first are of "".
    """
    by_name: dict[str, list[Instruction]] = {"": []}
    for keyword, rest in instructions(text):
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            by_name[f"{name} FROM {base}".strip()] = []
        else:
            by_name[list(by_name)[-1]].append((keyword, rest))
    return by_name


def arguments(text: str) -> dict[str, str]:
    """Return the build arguments with their defaults."""
    return dict(
        rest.partition("=")[::2] for keyword, rest in instructions(text) if keyword == "ARG"
    )


def is_sent(path: str, patterns: list[str]) -> bool:
    """Return whether .dockerignore lets a file of the repository pass:
    the last pattern that fits decides.
    """
    parts = Path(path).parts
    prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    sent = True
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        fits = any(fnmatch(prefix, plain.replace("**/", "*")) for prefix in prefixes)
        sent = pattern.startswith("!") if fits else sent
    return sent


DOCKERFILE = FILES[0].read_text()
IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]
COPIED = [
    source
    for keyword, rest in instructions(DOCKERFILE)
    if keyword == "COPY" and "--from=" not in rest
    for source in rest.split()[:-1]
]


def test_the_parser_reads_stages() -> None:
    """Comments within an instruction and joined lines are no instructions of their own."""
    text = "ARG A=1\nFROM x AS y\nRUN a \\\n# why\n    && b\nFROM y\nUSER 1\n"
    assert stages(text) == {
        "": [("ARG", "A=1")],
        "y FROM x": [("RUN", "a && b")],
        "FROM y": [("USER", "1")],
    }


def test_compilers_stay_in_their_stage() -> None:
    """The image is made of the first and the last stage;
    Horovod's wheel is all it takes from the one between.
    """
    assert list(stages(DOCKERFILE)) == [
        "",
        "packages FROM ${BASE}",
        "wheel FROM ${BUILD_BASE}",
        "runtime FROM packages",
    ]
    _, packages, wheel, runtime = stages(DOCKERFILE).values()
    assert any("g++" in rest for _, rest in wheel)
    assert not [
        rest
        for _, rest in [*packages, *runtime]
        if re.search(r"g\+\+|gcc|\bmake\b|build-essential|-dev(?!\.txt)\b", rest)
    ]
    assert [rest for keyword, rest in runtime if keyword == "COPY"] == [
        "--from=wheel /wheelhouse /opt/trainkit/wheelhouse"
    ]


def test_what_is_copied_is_there_and_is_sent() -> None:
    """Also each file that pyproject.toml names for trainkit's wheel;
    nothing of the history, of tests, of environments.
    """
    assert len(COPIED) >= 7
    assert [
        source for source in COPIED if not (ROOT / source).exists() or not is_sent(source, IGNORED)
    ] == []
    assert {"trainkit", "recipes", "conf", "README.md", "LICENSE", "pyproject.toml"} <= set(COPIED)
    assert is_sent("trainkit/extensions/horovod_build/horovod.cmake", IGNORED) and is_sent(
        "recipes/digits.npz", IGNORED
    )
    for path in (
        ".git/config",
        "tests/conftest.py",
        ".venv/bin/python",
        "runs/mine/x",
        "docs/index.md",
        "secret.env",
    ):
        assert not is_sent(path, IGNORED), path
    assert not is_sent("trainkit/run/__pycache__/run.pyc", IGNORED)


def test_versions_are_those_that_the_tests_run_with() -> None:
    """torch's are those of requirements-dev.txt;
    Horovod's comes from trainkit's command, and is nowhere else.
    """
    pinned = dict(
        re.findall(
            r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE
        )
    )
    given = arguments(DOCKERFILE)
    assert (given["TORCH"], given["TORCHVISION"]) == (pinned["torch"], pinned["torchvision"])
    assert set(re.findall(r"horovod\W{1,2}(\d[\d.]+)", DOCKERFILE)) <= {VERSION}
    assert f"(13 for torch {given['TORCH'].rpartition('.')[0]})" in part(PAGE, "Containers")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_python_is_one_that_trainkit_runs_on(file: Path) -> None:
    """The base images' Python is in the range that is tested."""
    versions = re.findall(r"python:(\d+)\.(\d+)", file.read_text())
    assert versions
    assert all(PYTHONS[0] <= (int(major), int(minor)) <= PYTHONS[1] for major, minor in versions)


def test_constraints_are_the_pins_without_torch() -> None:
    """What the image's packages are held to, by the command in the Dockerfile itself."""
    command = re.search(r"sed -nE '[^']+'", "\n".join(rest for _, rest in instructions(DOCKERFILE)))
    assert command is not None
    done = subprocess.run(
        f"{command[0]} requirements-dev.txt",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 200 and all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert {"rich", "numpy", "cloudpickle", "torchmetrics"} <= names
    assert not {name for name in names if re.match(r"(torch|torchvision|triton|nvidia-.*)$", name)}


def pins(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the program that prints the pins for the image, from a folder like the image's."""
    copied = ("docker/pins.py", "requirements-dev.txt", "pyproject.toml")
    with tempfile.TemporaryDirectory() as folder:
        for name in copied:
            shutil.copy(ROOT / name, folder)
        command = [sys.executable, f"{folder}/pins.py", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_installed_has_hashes() -> None:
    """pip compares them with all but trainkit's own folder,
    and torch of another index without a given hash.
    """
    commands = re.findall(
        r"pip install[^&;}]*", "\n".join(rest for _, rest in instructions(DOCKERFILE))
    )
    hashed = [command for command in commands if "--require-hashes" in command]
    own = [
        command
        for command in commands
        if command.split()[2:] == ["--no-deps", "--no-build-isolation", "/src"]
    ]
    of_torch = [
        command for command in commands if "/torch.txt" in command or '"torch==$TORCH"' in command
    ]
    assert (len(hashed), len(own), len(of_torch)) == (3, 1, 2) and len(commands) == 6
    assert all("--no-deps" in command for command in hashed)


def test_the_pins_of_the_image_are_whole() -> None:
    """They are those of requirements.txt, which uv has resolved;
    what is left out is torch's, and what only builds Horovod.
    """
    names = re.compile(r"^([\w.-]+)==", re.MULTILINE)
    resolved = set(names.findall((ROOT / "requirements.txt").read_text()))
    needs = [normal.split(">=")[0] for normal in RUNTIME_NEEDS]
    program = re.search(r"pins.py \$torch (.*?) >", DOCKERFILE)
    assert program is not None
    words = shlex.split(program[1].replace("$EXTRAS", ""))
    assert {"trainkit", *needs} <= {*words, "setuptools"}
    for torch, left in (
        ("--without-torch", {"cmake", "wheel"}),
        ("torchvision", {"cmake", "wheel"}),
    ):
        printed = pins(torch, *words)
        assert printed.returncode == 0, printed.stderr
        of_torch = {
            name
            for name in resolved
            if re.match(r"(torch|torchvision|triton|nvidia-.*|cuda-.*)$", name)
        }
        pinned = set(names.findall(printed.stdout))
        assert resolved - pinned == left | (of_torch if torch == "--without-torch" else set())
        assert all("--hash=sha256:" in block for block in re.split(r"\n(?=\w)", printed.stdout))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainkit[wandb,prometheus]", {"wandb", "nvidia-ml-py", "prometheus-client"}),
        ("hatchling", {"hatchling", "pathspec", "trove-classifiers"}),
        (
            "trainkit[deepspeed]",
            "deepspeed>=0.19.8 has no hash: requirements-dev.txt has no such package.",
        ),
        ("trainkit[gpu]", "trainkit has no extra gpu; it has horovod, deepspeed, wandb"),
        ("torch==2.0", "torch==2.0 has no hash: requirements-dev.txt has torch=="),
    ],
)
def test_pins_are_printed_or_their_lack_is_said(words: str, expected: set[str] | str) -> None:
    """An extra brings all that it needs; what the tests do not run with has no hash to compare."""
    printed = pins("--without-torch", words)
    if isinstance(expected, str):
        assert printed.returncode == 1 and printed.stderr.startswith(expected)
    else:
        assert expected <= set(re.findall(r"^([\w.-]+)==", printed.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    "options", [arguments(DOCKERFILE)["HOROVOD"], "--gpu --mpi", "--cpu --mpi"]
)
def test_horovods_command_takes_the_options(options: str) -> None:
    """The same words build the wheel in one stage, and select it in the next."""
    commands = re.findall(
        r"python -m trainkit horovod (\w+) (.*?wheelhouse)(?: &&|$)",
        "\n".join(r for _, r in instructions(DOCKERFILE)),
        re.M,
    )
    assert [name for name, _ in commands] == ["wheel", "install"]
    for name, words in commands:
        given = parser().parse_args([name, *words.replace("$HOROVOD", options).split()])
        assert (given.mpi, given.gpu) == ("--mpi" in options, "--gpu" in options)
    defaults = [
        rest
        for keyword, rest in instructions(DOCKERFILE)
        if keyword == "ARG" and rest.startswith("HOROVOD=")
    ]
    assert len(defaults) == 2 and len(set(defaults)) == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_user_is_not_root(file: Path) -> None:
    """The last user of an image is one that it makes."""
    made = instructions(file.read_text())
    users = [rest for keyword, rest in made if keyword == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert any(
        f"useradd --uid {users[-1]}" in rest or f" {users[-1]} " in rest
        for _, rest in made
        if "useradd" in rest
    )


def test_the_doctor_is_the_last_step_and_is_not_root() -> None:
    """An image whose ranks cannot sum, as its own user, is not made."""
    last = list(stages(DOCKERFILE).values())[-1]
    keywords = [keyword for keyword, _ in last]
    runs = [i for i, keyword in enumerate(keywords) if keyword == "RUN"]
    assert "python -m trainkit doctor &&" in last[runs[-1]][1] and keywords.index("USER") < runs[-1]
    # Kubernetes' runAsNonRoot needs a number
    assert re.fullmatch(r"[1-9]\d*", last[keywords.index("USER")][1])
    assert json.loads(last[-1][1]) == ["python", "-m", "trainkit", "doctor"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_fetched_but_packages(file: Path) -> None:
    """No ADD, no download, no address but that of torch's index,
    and nothing secret among arguments and variables.
    """
    made = instructions(file.read_text())
    assert "ADD" not in {keyword for keyword, _ in made}
    text = "\n".join(rest for _, rest in made)
    assert not re.findall(r"\b(curl|wget|git clone)\b", text)
    assert set(re.findall(r"https?://[^\s\"]+", text)) <= {"https://download.pytorch.org/whl/cpu"}
    named = [rest for keyword, rest in made if keyword in ("ARG", "ENV")]
    assert not [
        rest for rest in named if re.search(r"(?i)token|secret|passw|api_?key|credential", rest)
    ]


def test_the_page_has_each_argument() -> None:
    """With its default where it is a word; and the page's builds give none that does not exist."""
    rows = dict(
        re.findall(r"^\| (`[A-Z_`, ]+`) \| (.*?) \|", part(PAGE, "Containers"), re.MULTILINE)
    )
    described = {
        name: cell for names, cell in rows.items() for name in re.findall(r"[A-Z_]+", names)
    }
    given = arguments(DOCKERFILE)
    assert set(described) == set(given)
    for name in ("BASE", "TORCH", "TORCHVISION", "HOROVOD"):
        assert f"`{given[name]}`" in described[name], name
    assert set(re.findall(r"--build-arg (\w+)=", part(PAGE, "Containers"))) <= set(given)


def test_the_dev_container_is_made_of_files_that_exist() -> None:
    """Its Dockerfile, its user, the target of make that it ends with."""
    folder = ROOT / ".devcontainer"
    config = json.loads((folder / "devcontainer.json").read_text())
    text = (folder / config["build"]["dockerfile"]).read_text()
    assert ("USER", config["remoteUser"]) in instructions(text)
    target = re.search(r"make (\w+)$", config["postCreateCommand"])
    assert target is not None and re.search(
        rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert config["mounts"][0]["target"] == f"/home/{config['remoteUser']}/.cache"
    assert {"g++", "make", "git", "iproute2", "openssh-server"} <= set(text.split())


def test_apptainers_definition_fits_the_page() -> None:
    """It begins with the file that the page writes, runs trainkit, and tests with the doctor."""
    text = (ROOT / "apptainer" / "trainkit.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?: .*\n|\n)*)", text, re.MULTILINE))
    assert re.match(r"Bootstrap: docker-archive\nFrom: \{\{ ARCHIVE \}\}\n", text)
    archive = re.search(r"^ +ARCHIVE=(\S+)$", sections["arguments"], re.MULTILINE)
    assert archive is not None
    lines = [line for block in blocks(PAGE, "Containers") for line in block.commands]
    assert f"docker save trainkit:cuda -o {archive[1]}" in lines
    assert "apptainer build trainkit.sif apptainer/trainkit.def" in lines
    assert sections["runscript"].strip() == 'exec python -m trainkit "$@"'
    assert "python -m trainkit doctor" in sections["test"]
