# lipnext_scale for GPU clusters; docs/container.md has how to build and run it.
#
# The wheels of torch bring CUDA, cuDNN and NCCL with them, so the smallest CUDA image is enough: it
# adds what old drivers need to run newer CUDA, and asks the container runtime for GPUs.
# Any Debian or Ubuntu with Python 3.11 or newer does as well (BASE=debian:bookworm-slim).
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
# What of the package's extras is installed. Without `ffcv` nothing is compiled.
ARG EXTRAS=all,ffcv
# Where things are compiled: of the same distribution as BASE. An image with nvcc is needed by
# nothing in here.
ARG BUILD_BASE=${BASE}

# ---- dependencies: a virtual environment, from the pins alone ------------------------------------
FROM ${BUILD_BASE} AS dependencies
ENV DEBIAN_FRONTEND=noninteractive \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# Versions of Debian packages are those of the base image's release.
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -q -y --no-install-recommends \
        ca-certificates g++ libopencv-dev libturbojpeg0-dev pkg-config python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
# pip reads these by itself: another package index than its own, or one beside it. Its own has torch
# built for CUDA.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS
WORKDIR /build
COPY pyproject.toml constraints.txt LICENSE ./
COPY lipnext_scale/__init__.py lipnext_scale/
# The package without its code asks for all that the package needs, so that a change of the code
# installs nothing anew. FFCV is linked with the libraries that it calls, not with all of OpenCV.
# Its opencv-python wants a display; the headless build fills the same folder.
RUN touch README.md \
    && LDFLAGS=-Wl,--as-needed pip install --quiet -c constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --quiet --yes lipnext_scale opencv-python \
    && pip install --quiet -c constraints.txt --force-reinstall --no-deps opencv-python-headless
COPY launch/container/runtime_packages.py ./
RUN python runtime_packages.py /opt/venv '_libffcv*.so' > /opt/runtime-packages

# ---- package: the code as a wheel ----------------------------------------------------------------
FROM dependencies AS package
COPY README.md ./
COPY configs configs
COPY data_prep data_prep
COPY lipnext_scale lipnext_scale
RUN pip wheel --quiet --no-deps --wheel-dir /opt/package .

# ---- the image -----------------------------------------------------------------------------------
FROM ${BASE} AS runtime
COPY --from=dependencies /opt/runtime-packages /opt/runtime-packages
# tini passes SIGTERM on, upon which a run saves, and collects what worker processes leave behind.
# The compiler and Python's headers are for torch.compile and for what DeepSpeed builds at its first
# start; the ibverbs are what NCCL talks to InfiniBand and RoCE with; by numactl torchrun binds ranks.
# hadolint ignore=DL3008
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive xargs --arg-file=/opt/runtime-packages \
        apt-get install -q -y --no-install-recommends \
        ca-certificates g++ ibverbs-providers libibverbs1 numactl python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 lipnext \
    && install --directory --mode 1777 /workspace
COPY --from=dependencies /opt/venv /opt/venv
# A base that is not made for GPUs says nothing of them; the container runtime looks for these. The
# last one is how long torchrun lets ranks save after SIGTERM.
ENV PATH=/opt/venv/bin:${PATH} \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONUNBUFFERED=1 \
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
COPY --from=package /opt/package /opt/package
RUN pip install --no-cache-dir --no-index --no-deps /opt/package/*.whl
WORKDIR /workspace
COPY configs configs
COPY launch launch
# lipnext; by number, so that a cluster that asks for "not root" can see that it is not.
USER 10001
# Last of all, the doctor checks the image as its own user: anything wrong ends the build. That there
# is no GPU here is not. To the doctor FFCV is a choice; in here it is asked for.
ARG EXTRAS
RUN python -m lipnext_scale.doctor --config configs/digits.yaml \
    && case ",${EXTRAS}," in *,ffcv,*) python -c 'import ffcv' ;; esac

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lipnext_scale" \
      org.opencontainers.image.description="Training of certified-robust LipNeXt classifiers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python", "-m", "lipnext_scale.doctor"]
