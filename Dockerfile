# The command `qbheat` in a container. PyTorch comes with CUDA, or from the index in TORCH_INDEX,
# such as PyTorch's own for CPUs:
#   docker build -t qbheat [--build-arg TORCH_INDEX=ADDRESS] .
#   docker run --rm [--gpus all] --user "$(id -u):$(id -g)" -v "$PWD:/work" qbheat \
#       predict --weights … --images … --output …
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/qbheat_det
COPY constraints.txt setup.py README.md LICENSE MANIFEST.in pyproject.toml ./
COPY tools ./tools
# What changes rarely comes first, so that a change of the package installs the package alone. The
# CPU's builds have versions of their own ("+cpu"), which the committed pins do not name.
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" torch torchvision; \
    else pip install --constraint constraints.txt torch torchvision; fi \
    && grep -vE '^(torch|torchvision|nvidia-|cuda-|triton)' constraints.txt > /tmp/constraints.txt \
    && PIP_CONSTRAINT=/tmp/constraints.txt PIP_BUILD_CONSTRAINT=/tmp/constraints.txt \
       python tools/install_detectron2.py
COPY configs ./configs
COPY qbheat_det ./qbheat_det
RUN PIP_BUILD_CONSTRAINT=/tmp/constraints.txt \
    pip install --constraint /tmp/constraints.txt '.[eval,export,opencv,serve]'

# Any user may run it (`--user`), so that the files written to /work belong to who started it.
RUN useradd --create-home user && chmod 777 /home/user
ENV HOME=/home/user USER=user
USER user
WORKDIR /work
ENTRYPOINT ["qbheat"]
CMD ["--help"]
