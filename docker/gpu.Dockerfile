# titan_rl on NVIDIA GPUs, as `make install MODE=gpu` makes it. From the root of a checkout:
#   docker build -f docker/gpu.Dockerfile -t titan-rl:gpu .
#   docker run --rm -it --gpus all --shm-size 16g -v "$PWD/runs:/home/titan/work/runs" titan-rl:gpu train quickstart
# The CUDA libraries come with torch's wheels; nvcc and headers are there for compilers at run time.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv python3.12-dev bubblewrap libseccomp2 make g++ libnuma1 git \
    && rm -rf /var/lib/apt/lists/*
RUN userdel --remove ubuntu \
    && useradd --create-home --uid 1000 titan \
    && install -d -o titan /home/titan/work
WORKDIR /opt/titan_rl
COPY --chown=titan:titan . .
RUN chown titan:titan /opt/titan_rl
USER 1000
RUN make install MODE=gpu && rm -rf /home/titan/.cache
ENV PATH="/opt/titan_rl/.venv/bin:$PATH"
WORKDIR /home/titan/work
ENTRYPOINT ["titan-rl"]
CMD ["--help"]
