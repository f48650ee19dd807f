# BOSCH-pipeline with everything that a recipe's stages need.
#
#   docker build -t bosch .                          # CPU
#   docker build -t bosch:gpu --build-arg MODE=gpu . # GPU: run it with --gpus all
#   docker run --rm -v "$PWD/runs:/opt/bosch/runs" bosch run recipes/quickstart.yaml
#
# torch's wheel brings CUDA's libraries, so both start from the same image.
FROM python:3.12-slim

ARG MODE=cpu
WORKDIR /opt/bosch
COPY . .
RUN launch/setup.sh ${MODE} && rm -rf ~/.cache
ENV PATH="/opt/bosch/.venv/bin:${PATH}"
ENTRYPOINT ["bosch"]
CMD ["--help"]
