#!/bin/sh
# DeepSpeed into .venv/deepspeed, beside the environment, where only its tests see it.
test -d .venv/deepspeed && exit 0
DS_BUILD_OPS=0 python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target .venv/deepspeed \
    deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 ninja==1.13.2 einops==0.8.2 msgpack==1.2.4 && exit 0
rm -rf .venv/deepspeed
echo "DeepSpeed cannot be installed here: its tests are skipped"
