# bert-tasks on a CPU. Built from a checkout:
#   docker build --tag bert-tasks .
#   docker build --tag bert-tasks --build-arg EXTRAS=quickstart,serve,export,tracking .
#   docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" --no-healthcheck bert-tasks train recipe.toml
#   docker run --rm --volume "$PWD:/work" --publish 8000:8000 bert-tasks serve runs/first/model --host 0.0.0.0
FROM python:3.11.9-slim-bookworm AS build

ARG EXTRAS=quickstart,serve,export
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/bert-tasks
ENV PATH=/opt/bert-tasks/bin:$PATH
WORKDIR /build

# The large layer first: it changes only with the pins.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch

COPY pyproject.toml README.md LICENSE ./
COPY bert_tasks ./bert_tasks
RUN pip install --constraint constraints.txt ".[$EXTRAS]"


FROM python:3.11.9-slim-bookworm

RUN useradd --create-home --uid 10001 bert
COPY --from=build /opt/bert-tasks /opt/bert-tasks
# The cache is for everybody: the container may run as the caller's user, so that files in /work are the caller's.
RUN mkdir --mode 1777 /cache
ENV PATH=/opt/bert-tasks/bin:$PATH HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
WORKDIR /work
USER 10001:10001
EXPOSE 8000
# It asks the server. A container that trains has none: run it with --no-healthcheck.
HEALTHCHECK --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://localhost:8000/healthz', timeout=5)"]
ENTRYPOINT ["bert-tasks"]
CMD ["--help"]
