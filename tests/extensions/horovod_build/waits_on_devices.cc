// Horovod's own threads around a device and an NCCL that do what this test says: a sum that never ends by itself, and
// whose event is complete once its communicator is aborted, as on a GPU.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <string>
#include <thread>

#include "horovod/common/global_state.h"
#include "horovod/common/logging.h"
#include "horovod/common/ops/nccl_operations.h"

using namespace horovod::common;
using namespace std::chrono_literals;

namespace {

std::atomic_bool kernel_runs{true};      // the sum on the device
std::atomic_bool communicator_lives{true};
std::atomic_int looks_after_the_end{0};  // at a communicator that is gone
std::atomic_int looks{0};
std::atomic_int aborts{0};

int here;  // what a communicator and an event point to

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(&here);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return kernel_runs ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  while (kernel_runs) std::this_thread::sleep_for(1ms);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int* greatest) { *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = reinterpret_cast<cudaStream_t>(&here);
  return cudaSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  ++looks;
  if (!communicator_lives) ++looks_after_the_end;
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) {
  ++aborts;
  communicator_lives = false;
  kernel_runs = false;  // and leaves garbage
  std::this_thread::sleep_for(50ms);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) {
  while (kernel_runs) std::this_thread::sleep_for(1ms);
  communicator_lives = false;
  std::this_thread::sleep_for(50ms);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
}

namespace {

class NoFusion : public OpContext {
public:
  Status AllocatePersistent(int64_t, std::shared_ptr<PersistentBuffer>*) override { return Status::OK(); }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override { return Status::OK(); }
  Status AllocateOutput(int, TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override { return Status::OK(); }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override { return Status::OK(); }
  Framework framework() const override { return Framework::PYTORCH; }
};

std::future<Status> sum(const std::string& name, GPUOpContext& op, NCCLOpContext& nccl) {
  auto done = std::make_shared<std::promise<Status>>();
  TensorTableEntry entry;
  entry.tensor_name = name;
  entry.device = 0;
  entry.context = std::make_shared<NoFusion>();
  entry.callback = [done](const Status& status) { done->set_value(status); };
  std::vector<TensorTableEntry> entries{entry};
  op.InitGPU(entries);
  op.InitGPUQueue(entries, Response());
  op.FinalizeGPUQueue(entries, true, nccl.error_check_callback_);
  return done->get_future();
}

std::string answer(std::future<Status>& result) {
  if (result.wait_for(5s) != std::future_status::ready) return "no answer";
  Status status = result.get();
  return status.ok() ? "OK" : status.reason();
}

}  // namespace

// aborted lost|ended|failed elastic|plain
int main(int, char** arguments) {
  const std::string what = arguments[1];
  const bool elastic = !std::strcmp(arguments[2], "elastic");
  // Of Horovod's state the parts alone that these functions read: the rest needs all of Horovod.
  alignas(HorovodGlobalState) static char memory[sizeof(HorovodGlobalState)];
  auto& state = *reinterpret_cast<HorovodGlobalState*>(memory);
  new (&state.timeline) Timeline();
  new (&state.fusion_buffer) FusionBufferManager();
  auto& device = *new GPUContext();
  auto& nccl = *new NCCLContext();
  state.num_nccl_streams = 1;
  state.elastic_enabled = elastic;
  nccl.elastic = elastic;
  nccl.nccl_comms.resize(1);
  device.streams.resize(1);
  device.finalizer_thread_pool.create(1);
  communicator_end().Reset();

  GPUOpContext op(&device, &state);
  NCCLOpContext nccl_op(&nccl, &state, Communicator::GLOBAL);
  auto& communicator = nccl.nccl_comms[0][std::make_tuple(0, std::vector<int32_t>{0, 1})];
  communicator = reinterpret_cast<ncclComm_t>(&here);
  nccl_op.nccl_comm_ = &communicator;

  auto first = sum("first", op, nccl_op);
  auto second = sum("second", op, nccl_op);  // waits in the pool until the first has ended
  while (looks < 10 && looks_after_the_end == 0 && elastic) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(20ms);
  if (what == "lost") {  // the background thread was told of a dead peer
    EndCommunicators({&nccl}, true);
  } else if (what == "failed") {  // an operation of NCCL failed in the background thread
    try {
      nccl.ErrorCheck("ncclAllReduce", ncclSystemError, communicator);
    } catch (const std::exception&) {
    }
    EndCommunicators({&nccl}, true);
  } else {  // all ranks end, and the sums end by themselves meanwhile
    std::thread kernel([] { std::this_thread::sleep_for(50ms); kernel_runs = false; });
    EndCommunicators({&nccl}, false);
    kernel.join();
  }
  std::thread([&device] { device.Finalize(); }).detach();
  const std::string one = answer(first), two = answer(second);
  std::printf("first: %s\nsecond: %s\naborts: %d\nlooks after the end: %d\n", one.c_str(), two.c_str(),
              aborts.load(), looks_after_the_end.load());
  std::fflush(stdout);
  std::quick_exit(0);
}
