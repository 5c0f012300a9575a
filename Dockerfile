# An image with trainkit, torch and Horovod: for CPUs by default, for GPUs with the arguments in docs/launchers.md.
#
#   packages   Python, torch, trainkit
#   wheel      compilers beside them; only Horovod's wheel leaves this stage
#   runtime    packages and the wheel, Open MPI if it is asked for, ssh; not root
#
# Debian's packages have no versions here: its mirrors keep only the last one.
# hadolint global ignore=DL3008
ARG BASE=python:3.12-slim-bookworm
# For GPUs one with nvcc. Its Python and C library must be those of BASE: Horovod is compiled with them.
ARG BUILD_BASE=${BASE}

# No CUDA from the base image: torch's wheels bring their own, and a second copy would add gigabytes.
FROM ${BASE} AS packages
RUN command -v python3 > /dev/null || { apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/trainkit
ENV PATH=/opt/trainkit/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
ARG TORCH=2.15.0
ARG TORCHVISION=0.29.2
# torch's builds without CUDA; empty: those of pip's index, which have CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# SHA-256 of the two wheels of TORCH_INDEX; empty: what that index says. Those of pip's index are in requirements-dev.txt.
ARG TORCH_HASH=
ARG TORCHVISION_HASH=
# Before trainkit, so that a change of trainkit downloads torch no second time.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$TORCH_INDEX" ]; then \
        echo "torch==$TORCH${TORCH_HASH:+ --hash=sha256:$TORCH_HASH}" > /opt/trainkit/torch.txt \
        && echo "torchvision==$TORCHVISION${TORCHVISION_HASH:+ --hash=sha256:$TORCHVISION_HASH}" >> /opt/trainkit/torch.txt \
        && pip install --no-deps --index-url "$TORCH_INDEX" --requirement /opt/trainkit/torch.txt; \
    fi
COPY pyproject.toml requirements-dev.txt README.md LICENSE docker/pins.py /src/
# What builds trainkit and packages without a wheel: pip compares no hashes of what it fetches for a build by itself.
RUN --mount=type=cache,target=/root/.cache/pip \
    python /src/pins.py setuptools hatchling > /opt/trainkit/pins.txt \
    && pip install --no-deps --require-hashes --requirement /opt/trainkit/pins.txt
# Further extras of pyproject.toml: EXTRAS=transformers,wandb
ARG EXTRAS=
# The versions that the tests ran with, and after trainkit's what Horovod needs; torch's are chosen above, if it is of another index.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$TORCH_INDEX" ]; then torch=--without-torch; else torch="torch==$TORCH torchvision==$TORCHVISION"; fi \
    && python /src/pins.py $torch trainkit "trainkit[$EXTRAS]" cloudpickle psutil pyyaml packaging cffi > /opt/trainkit/pins.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement /opt/trainkit/pins.txt
COPY trainkit /src/trainkit
COPY recipes /src/recipes
COPY conf /src/conf
# Without an effect, but for a torch for CUDA of another index, which needs CUDA's libraries of its own versions.
RUN --mount=type=cache,target=/root/.cache/pip \
    sed -nE '/^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/d; s/^([A-Za-z0-9._-]+==[^ ]+).*/\1/p' \
        /src/requirements-dev.txt > /opt/trainkit/constraints.txt \
    && pip install --no-deps --no-build-isolation /src \
    && { [ -z "$TORCH_INDEX" ] || pip install --constraint /opt/trainkit/constraints.txt "torch==$TORCH" "torchvision==$TORCHVISION"; } \
    && pip check

FROM ${BUILD_BASE} AS wheel
# Options of `trainkit horovod wheel`, the parts that Horovod gets: "--gpu --mpi" for NCCL and MPI.
ARG HOROVOD=--cpu
# Debian's Python and its headers only where the base image has none.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make \
    && { command -v python3 > /dev/null || apt-get install -y --no-install-recommends python3; } \
    && { test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
         || apt-get install -y --no-install-recommends python3-dev; } \
    && case "$HOROVOD" in *--mpi*) apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin ;; esac \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/trainkit/bin:$PATH
COPY --from=packages /opt/trainkit /opt/trainkit
COPY --from=packages /src /src
# The GPUs that Horovod's kernels are compiled for, as 80,90; empty: all that it knows.
ARG HOROVOD_BUILD_CUDA_CC_LIST=
WORKDIR /wheelhouse
RUN --mount=type=cache,target=/root/.cache/pip \
    python /src/pins.py cmake wheel > pins.txt && pip install --no-deps --require-hashes --requirement pins.txt && rm pins.txt
# The cache keeps the wheel: a change of trainkit alone compiles nothing.
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache \
    PIP_CONSTRAINT=/opt/trainkit/constraints.txt python -m trainkit horovod wheel $HOROVOD --out /wheelhouse

FROM packages AS runtime
ARG HOROVOD=--cpu
# ssh starts ranks on other hosts. The keys that sshd's package makes are removed: all who have the image would have them.
# myhostname: torchrun and Gloo look up the container's own name, which a runtime on the host's network may not write to /etc/hosts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnss-myhostname openssh-client openssh-server \
    && case "$HOROVOD" in *--mpi*) apt-get install -y --no-install-recommends openmpi-bin ;; esac \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY --from=wheel /wheelhouse /opt/trainkit/wheelhouse
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache \
    PIP_CONSTRAINT=/opt/trainkit/constraints.txt python -m trainkit horovod install $HOROVOD --wheelhouse /opt/trainkit/wheelhouse
# The folder is every user's, and HOME, for `docker run --user`: files on a mounted folder then belong to the one that started it.
RUN useradd --uid 10001 --create-home --shell /bin/bash trainkit && mkdir --mode 1777 /workspace
# What NVIDIA's runtime adds to a container; the kernel lets no process of a container read another's memory for Open MPI.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility OMPI_MCA_btl_vader_single_copy_mechanism=none HOME=/workspace PYTHONUNBUFFERED=1
# A number: Kubernetes' runAsNonRoot does not look names up.
USER 10001
WORKDIR /workspace
# An image whose ranks cannot sum is not made. A HEALTHCHECK would repeat these sums beside a training job.
RUN mkdir /tmp/home && HOME=/tmp/home python -m trainkit doctor && rm -rf /tmp/*
CMD ["python", "-m", "trainkit", "doctor"]
