// An emulated accelerator: a device "emu" that computes on the CPU and behaves as a GPU. What would
// be wrong on a GPU ends with an error, or shows in a number: how often the host has waited, or the
// times of events. It has no numerics, kernels or speed of a GPU, and none of NCCL's hangs.
//
// Memory. An address on the device is an address of the host with tag bits, which no host code can
// follow. The block behind it knows which streams have used it. Fresh memory is NaN.
// Operators. A call takes CPU tensors for the device's ("aliases", which copy nothing), runs the
// CPU's kernel at once, and wraps what comes out. Random numbers are the CPU's.
// Streams. Results are always those of the order in which the host calls. Whether a GPU would have
// kept this order is for the clocks to say: each stream counts its kernels and events, and knows of
// each other stream up to which of them it has waited for it. An access that is not ordered is a
// race. The host has such a clock, too: it tells events that are read too early.
// Time. A stream is busy until its last kernel ends, and the host runs ahead. Without EMU_SIM, a
// kernel takes the time that it takes here. With it, time is simulated, and each run has the same.
// emu_ccl. Collectives as NCCL has them, by gloo, on a stream for each communicator. A future makes
// the current stream wait, as that of the backend nccl2 does.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <set>

namespace {
using at::Tensor, at::IValue, c10::Device, c10::Stream, c10::Storage, std::optional, std::vector;
using Lock = std::lock_guard<std::recursive_mutex>;
constexpr auto EMU = c10::kPrivateUse1;
constexpr auto EMU_KEY = c10::DispatchKey::PrivateUse1;

// == Clocks: of each stream, how many kernels have ended, as somebody knows ==
int setting(const char* name, int value) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : value;
}
double simulated(const char* name) {  // seconds, of EMU_SIM=kernel=1000,comm=3000 in us
  const char* text = std::getenv("EMU_SIM");
  const char* found = text ? strstr(text, name) : nullptr;
  return found ? std::atof(found + strlen(name)) / 1e6 : 0;
}
const int DEVICES = setting("EMU_DEVICES", 4), POOL = 32;  // streams besides the default one
const int QUEUES = DEVICES * (POOL + 1);
const bool SIM = std::getenv("EMU_SIM");
const double KERNEL = simulated("kernel="), COMM = simulated("comm=");
using Clock = vector<uint32_t>;

struct Queue {  // a stream
  double free_at = 0;
  Clock known = Clock(QUEUES);  // its own entry: the kernels that it has got
};
std::recursive_mutex mutex;
vector<Queue> queues(QUEUES);
Clock host_known(QUEUES);
double host_time = 0;
int64_t host_waits = 0, used_streams = 0;
bool is_started = false, is_bad_fork = false;
thread_local int current_device = 0;
thread_local vector<int> current_streams(DEVICES);

double now() {
  using namespace std::chrono;
  return SIM ? host_time : duration<double>(steady_clock::now().time_since_epoch()).count();
}
void check_start() {
  TORCH_CHECK(!is_bad_fork, "Cannot re-initialize emu in a forked subprocess; use 'spawn'");
  is_started = true;
}
Device device_of(int index) {
  TORCH_CHECK(index >= 0 && index < DEVICES, "emu: invalid device ordinal ", index);
  return Device(EMU, index);
}
Stream stream_of(Device d) {
  int index = d.has_index() ? d.index() : current_device;
  return Stream(Stream::UNSAFE, device_of(index), current_streams[index]);
}
int queue_of(Stream s) { return s.device_index() * (POOL + 1) + (int)s.id(); }
std::string name_of(int queue) {
  return c10::str("stream ", queue % (POOL + 1), " of emu:", queue / (POOL + 1));
}
void learn(Clock& clock, const Clock& more) {
  for (int i = 0; i < QUEUES; i++) clock[i] = std::max(clock[i], more[i]);
}
void host_waits_until(double time, const Clock& known) {
  Lock guard(mutex);
  host_waits += 1;
  host_time = std::max(host_time, time);
  learn(host_known, known);
}
void host_waits_for(Stream s) {
  const Queue& queue = queues[queue_of(s)];
  host_waits_until(queue.free_at, queue.known);
}

struct Kernel {  // runs during its life, on the stream
  const int queue;
  const double cost;
  const std::string name;
  double begin;
  Kernel(Stream s, double cost, std::string name) : queue(queue_of(s)), cost(cost), name(name) {
    check_start();
    Lock guard(mutex);
    learn(queues[queue].known, host_known);
    queues[queue].known[queue] += 1;
    begin = std::max(queues[queue].free_at, now());
  }
  ~Kernel() {
    Lock guard(mutex);
    queues[queue].free_at = SIM ? begin + cost : now();
  }
};

// == Memory ==
constexpr int TAG = 52;  // an address with bits above is none, on x86-64 and on aarch64
void* to_host(const void* p) { return (void*)((uintptr_t)p & ((uintptr_t(1) << TAG) - 1)); }

struct Access {
  size_t begin, end;
  int queue;
  uint32_t tick;
  bool is_write;
};
struct Block {  // of device memory
  Storage host;
  size_t size;
  int device, queue;  // the stream in which it was allocated
  vector<Access> accesses;
  std::set<int> recorded;  // by record_stream
};
auto& freed = *new vector<vector<Access>>(QUEUES);  // how others have used what a stream has freed
auto& stats = *new vector<c10::CachingDeviceAllocator::DeviceStats>(DEVICES);

void release(void* context) {
  auto* block = (Block*)context;
  Lock guard(mutex);
  stats[block->device].allocated_bytes[0].decrease(block->size);
  for (auto& a : block->accesses)
    if (a.queue != block->queue && !block->recorded.count(a.queue))
      freed[block->queue].push_back(a);
  delete block;
}
c10::DataPtr adopt(Storage host, int device) {  // makes memory of the host the device's
  check_start();
  Lock guard(mutex);
  const int queue = queue_of(stream_of(device_of(device)));
  for (auto& a : std::exchange(freed[queue], {}))  // a stream uses again what it has freed
    TORCH_CHECK(queues[queue].known[a.queue] >= a.tick || host_known[a.queue] >= a.tick,
                "emu: race: ", name_of(queue), " gets memory again that ", name_of(a.queue),
                " still uses: record_stream is missing");
  stats[device].allocated_bytes[0].increase(host.nbytes());
  const auto address = (uintptr_t)host.data_ptr().get(), tag = uintptr_t(device + 1) << TAG;
  auto* block = new Block{host, host.nbytes(), device, queue};
  return {address ? (void*)(address | tag) : nullptr, block, &release, device_of(device)};
}
Block& block_of(const Storage& s) { return *(Block*)s.data_ptr().get_context(); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Storage host({}, size, c10::GetCPUAllocator(), true);
    if (size) memset(host.mutable_data(), 0xff, size);  // NaN: nobody may read it
    return adopt(host, current_device);
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    memcpy(to_host(to), to_host(from), n);
  }
  bool initialized() override { return is_started; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream s) override {
    ((Block*)data.get_context())->recorded.insert(queue_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    return stats[d];
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {
    stats[d].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex d) override { stats[d].allocated_bytes[0].reset_peak(); }
};
auto& memory = *new DeviceMemory;

bool is_emu(const Tensor& t) { return t.defined() && t.device().type() == EMU; }

// Notes that a kernel, the last one of the stream, uses the memory of a tensor.
void note_access(const Tensor& t, const Kernel& kernel, bool is_write) {
  if (!is_emu(t) || t.numel() == 0) return;
  Lock guard(mutex);
  auto& accesses = block_of(t.storage()).accesses;
  size_t begin = t.storage_offset() * t.itemsize(), end = begin + t.itemsize();
  for (int64_t i = 0; i < t.dim(); i++) end += (t.size(i) - 1) * t.stride(i) * t.itemsize();
  const Clock& known = queues[kernel.queue].known;
  for (auto& a : accesses) {
    bool is_apart = a.begin >= end || begin >= a.end || !(is_write || a.is_write);
    TORCH_CHECK(is_apart || known[a.queue] >= a.tick, "emu: race: ", kernel.name, " in ",
                name_of(kernel.queue), is_write ? " writes" : " reads", " what ", name_of(a.queue),
                a.is_write ? " writes" : " reads", ": does it wait for it?");
  }
  std::erase_if(accesses, [&](auto& a) {  // the new one comes after these
    return std::tie(a.begin, a.end, a.queue, a.is_write) ==
           std::tie(begin, end, kernel.queue, is_write);
  });
  accesses.push_back({begin, end, kernel.queue, known[kernel.queue], is_write});
}

// == Streams and events ==
struct Event {
  int queue;
  double time;
  Clock known;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return EMU; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return Device(EMU, current_device); }
  void setDevice(Device d) const override { current_device = device_of(d.index()).index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  Stream getStream(Device d) const override { return stream_of(d); }
  Stream getDefaultStream(Device d) const override {
    return Stream(Stream::UNSAFE, stream_of(d).device(), 0);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {  // as of CUDA, there are but so many
    check_start();
    Lock guard(mutex);
    return Stream(Stream::UNSAFE, stream_of(d).device(), 1 + used_streams++ % POOL);
  }
  Stream exchangeStream(Stream s) const override {
    Stream old = stream_of(s.device());
    current_streams[s.device_index()] = (int)s.id();
    return old;
  }
  void synchronizeStream(const Stream& s) const override { host_waits_for(s); }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    const int first = (d < 0 ? current_device : d) * (POOL + 1);
    Queue all;
    for (int i = first; i <= first + POOL; i++) {
      all.free_at = std::max(all.free_at, queues[i].free_at);
      learn(all.known, queues[i].known);
    }
    host_waits_until(all.free_at, all.known);
  }
  void record(void** e, const Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    check_start();
    Lock guard(mutex);
    const int queue = queue_of(s);
    learn(queues[queue].known, host_known);
    queues[queue].known[queue] += 1;  // to record is work of the stream, too
    if (!*e) *e = new Event;
    *(Event*)*e = {queue, std::max(queues[queue].free_at, now()), queues[queue].known};
  }
  void block(void* e, const Stream& s) const override {
    if (!e) return;
    Lock guard(mutex);
    Queue& queue = queues[queue_of(s)];
    queue.free_at = std::max(queue.free_at, ((Event*)e)->time);
    learn(queue.known, ((Event*)e)->known);
  }
  bool queryEvent(void* e) const override { return !e || ((Event*)e)->time <= now(); }
  void synchronizeEvent(void* e) const override {
    if (e) host_waits_until(((Event*)e)->time, ((Event*)e)->known);
  }
  double elapsedTime(void* e1, void* e2, const c10::DeviceIndex) const override {
    TORCH_CHECK(e1 && e2, "Both events must be recorded before calculating elapsed time.");
    auto &a = *(Event*)e1, &b = *(Event*)e2;
    TORCH_CHECK(a.queue / (POOL + 1) == b.queue / (POOL + 1), "emu: events of two devices");
    for (Event* e : {&a, &b})
      TORCH_CHECK(host_known[e->queue] >= e->known[e->queue],
                  "emu: event not ready: ", "the host reads its time before it has waited for it");
    return 1000 * (b.time - a.time);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (data) memory.recordStream(data, s);
  }
};
auto& the_guard = *new Guard;

void wait_stream(Stream waiting, Stream other) {
  c10::Event event(EMU);
  event.record(other);
  event.block(waiting);
}

// == Operators: all run on the CPU's kernels ==
// CPU tensors that see the memory of the device tensors of a call, and the other way round.
struct Aliases {
  struct Pair {
    Tensor emu, cpu;
    bool is_write;
  };
  vector<Pair> pairs;

  static Tensor make(Storage storage, c10::DispatchKey key, const Tensor& like) {
    c10::DispatchKeySet keys(key);
    Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
    auto* impl = t.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return t;
  }
  Tensor to_cpu(const Tensor& t, bool is_write = false) {
    if (!is_emu(t)) return t;
    for (auto& pair : pairs) {
      if (!pair.emu.is_same(t)) continue;
      pair.is_write |= is_write;
      return pair.cpu;
    }
    pairs.push_back({t, make(block_of(t.storage()).host, c10::DispatchKey::CPU, t), is_write});
    return pairs.back().cpu;
  }
  Storage storage_of(const Storage& host, int device) {
    for (auto& pair : pairs)
      if (pair.cpu.storage().is_alias_of(host)) return pair.emu.storage();
    return Storage({}, host.nbytes(), adopt(host, device), &memory, true);
  }
  Tensor to_emu(const Tensor& t, int device) {
    if (!t.defined() || is_emu(t) || !t.has_storage()) return t;
    for (auto& pair : pairs)
      if (pair.cpu.is_same(t)) return pair.emu;
    pairs.push_back({make(storage_of(t.storage(), device), EMU_KEY, t), t, true});
    return pairs.back().emu;
  }
  void update() {  // a kernel may resize what it writes, or give it another storage
    for (auto& [emu, cpu, is_write] : pairs) {
      if (!is_write) continue;
      Storage host = cpu.storage(), storage = storage_of(host, emu.device().index());
      if (storage.nbytes() != host.nbytes()) {
        storage.set_data_ptr(adopt(host, emu.device().index()));
        storage.set_nbytes(host.nbytes());
      }
      auto* impl = emu.unsafeGetTensorImpl();
      if (!storage.is_alias_of(emu.storage())) impl->set_storage_keep_dtype(storage);
      if (emu.sizes() != cpu.sizes() || emu.strides() != cpu.strides())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

template <typename F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<optional<Tensor>> list;
  for (const optional<Tensor>& t : value.toOptionalTensorVector())
    list.push_back(t ? optional<Tensor>(f(*t)) : t);
  return list;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  optional<Device> device;
  auto meet = [&](Device other) {
    if (other.type() == EMU && !other.has_index()) other = Device(EMU, current_device);
    TORCH_CHECK(!device || *device == other, "Expected all tensors to be on the same device, but ",
                "found at least two devices, ", *device, " and ", other, "! (in ", name, ")");
    device = other;
  };
  Aliases aliases;
  for (size_t i = 0; i < num_arguments; i++) {
    IValue& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    value = map_tensors(value, [&](const Tensor& t) {
      if (is_emu(t) || (t.defined() && t.dim() > 0)) meet(t.device());
      return aliases.to_cpu(t, alias && alias->isWrite());
    });
    if (value.isDevice()) {
      meet(value.toDevice());
      value = Device(c10::kCPU);
    }
  }
  TORCH_CHECK(device, "emu: ", name, " has no tensor");
  const Stream stream = stream_of(*device);
  bool is_view = name == "aten::resize_" || name.rfind("aten::set_", 0) == 0;
  for (auto& r : schema.returns()) is_view |= r.alias_info() && !r.alias_info()->isWrite();
  {
    optional<Kernel> kernel;
    if (!is_view) {
      kernel.emplace(stream, KERNEL, name);
      for (auto& pair : aliases.pairs) note_access(pair.emu, *kernel, pair.is_write);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    aliases.update();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
      (*stack)[i] = map_tensors((*stack)[i], [&](const Tensor& t) {
        Tensor result = aliases.to_emu(t, device->index());
        if (kernel) note_access(result, *kernel, true);
        return result;
      });
    }
  }
}

Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
             optional<Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(EMU_KEY);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<Device> device, optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(EMU_KEY);
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, type);
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_upload = !is_emu(from), is_download = !is_emu(to);
  const bool is_small = is_upload && from.nbytes() <= 1 << 16;  // CUDA copies it aside at once
  // Where strides or types differ, CUDA copies by way of memory that is not pinned.
  const bool is_alike = from.strides() == to.strides() && from.dtype() == to.dtype();
  const bool is_pinned = is_alike && (is_upload ? from : to).is_pinned();
  const bool is_async = non_blocking && (is_small || is_pinned);
  const Stream stream = stream_of(is_upload ? to.device() : from.device());
  const Stream other = stream_of(is_download ? from.device() : to.device());
  if (other != stream) wait_stream(stream, other);
  {
    Kernel kernel(stream, 0, "copy");
    Aliases aliases;
    note_access(from, kernel, false);
    note_access(to, kernel, true);
    Tensor target = aliases.to_cpu(to);
    target.copy_(aliases.to_cpu(from));
  }
  if (other != stream) wait_stream(other, stream);
  if (!is_async && (is_upload || is_download)) host_waits_for(stream);
  return to;
}
at::Scalar local_scalar(const Tensor& t) { return t.cpu().item(); }
void record_stream(Tensor& t, Stream s) { memory.recordStream(t.storage().data_ptr(), s); }
Tensor& set_whole_storage(Tensor& t, Storage storage) { return at::native::set_(t, storage); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  auto& dispatcher = c10::Dispatcher::singleton();  // what the CPU does itself is not decomposed
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) || op->hasKernelForDispatchKey(EMU_KEY)) continue;
    bool is_own = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    if (is_own || op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// == Autocast: the lists of CUDA ==
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
using namespace at;
using namespace at::autocast;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

// == Hooks: what else torch asks of an accelerator ==
auto& pinned = *new std::set<void*>;  // memory of the host

struct PinnedMemory final : c10::Allocator {
  static void release(void* p) {
    Lock guard(mutex);
    pinned.erase(p);
    c10::free_cpu(p);
  }
  c10::DataPtr allocate(size_t size) override {
    check_start();
    Lock guard(mutex);
    void* p = *pinned.insert(c10::alloc_cpu(std::max<size_t>(size, 1))).first;
    return {p, p, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return DEVICES > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_started; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    return the_guard.exchangeDevice(device_of(d)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return d < 0 ? current_device : exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override {
    Lock guard(mutex);
    return pinned.count((void*)p);
  }
  Allocator* getPinnedMemoryAllocator() const override { return new PinnedMemory; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) memory.copy_data(data.get(), storage.data_ptr().get(), kept);
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(size);
  }
};

// == emu_ccl: collectives of device tensors, as NCCL has them, by gloo ==
using c10d::OpType;
using Tensors = vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_cpu(const Tensors& tensors) {
  Tensors list;
  for (auto& t : tensors) list.push_back(Aliases().to_cpu(t));
  return list;
}

struct Message final : c10d::Work {  // what a stream of the communicator does
  const Stream stream;
  c10::Event end{EMU};
  Tensors kept;  // until a stream waits: their memory is in use
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::function<void()> arrive;  // of messages between two processes: waits for the other one
  Message(OpType type, Stream stream, Tensors used)
      : Work(-1, type), stream(stream), kept(std::move(used)) {
    auto list = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(list, vector<Device>{stream.device()});
  }
  ~Message() override { finish(); }
  void finish() {
    if (arrive) std::exchange(arrive, nullptr)();
  }
  void complete(Tensors results) {
    end.record(stream);
    c10::StreamGuard guard(stream);
    future->markCompleted(IValue(std::move(results)));
  }
  bool isCompleted() override { return !arrive && end.query(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    finish();
    end.block(stream_of(stream.device()));
    if (opType_ == OpType::BARRIER) end.synchronize();
    kept.clear();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);  // as of the backend nccl2: the current stream waits
    return future;
  }
};

struct EmuCCL final : c10d::Backend {
  const c10::intrusive_ptr<c10d::Backend> gloo;
  optional<Stream> stream;
  double free_at = 0;  // an operation of a communicator waits for the one before
  explicit EmuCCL(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "emu_ccl"; }

  c10::intrusive_ptr<Message> begin(OpType type, Tensors reads, Tensors writes, bool is_async) {
    Tensors used = reads;
    used.insert(used.end(), writes.begin(), writes.end());
    Device device = stream ? stream->device() : Device(EMU, current_device);
    if (!stream && !used.empty()) device = used[0].device();
    device = getBoundDeviceId().value_or(device);
    for (auto& t : used) {
      TORCH_CHECK(is_emu(t), "emu_ccl: no tensor of ", t.device(), " can be sent");
      TORCH_CHECK(t.is_contiguous(), "emu_ccl: tensors must be contiguous");
      TORCH_CHECK(t.device() == device, "emu_ccl: a tensor of ", t.device(),
                  ", where the process has ", device);
    }
    if (!stream) check_devices(device.index());
    if (!stream) stream = the_guard.getNewStream(device, 0);
    auto message = c10::make_intrusive<Message>(type, is_async ? *stream : stream_of(device), used);
    wait_stream(message->stream, stream_of(device));
    return message;
  }
  void check_devices(int mine) {  // as NCCL; torchrun's agents stand for nodes
    if (setting("NCCL_MULTI_RANK_GPU_ENABLE", 0)) return;
    Tensors count = {at::zeros({setting("GROUP_WORLD_SIZE", 1), 64}, at::kInt)};
    count[0][setting("GROUP_RANK", 0)][setting("EMU_FIRST", 0) + mine] = 1;
    gloo->allreduce(count)->wait();
    TORCH_CHECK(count[0].max().item<int>() < 2, "emu_ccl: Duplicate GPU detected: two processes ",
                "of a group use the same device, one of them emu:", mine);
  }
  template <typename F>
  WorkPtr collective(OpType type, bool is_async, Tensors reads, Tensors writes, F call) {
    auto message = begin(type, reads, writes, is_async);
    {
      Kernel kernel(message->stream, COMM, c10d::opTypeToString(type));
      for (auto& t : reads) note_access(t, kernel, false);
      for (auto& t : writes) note_access(t, kernel, true);
      if (SIM) {  // it begins when all processes are there
        Tensors time = {at::full({1}, std::max(kernel.begin, free_at), at::kDouble)};
        c10d::AllreduceOptions latest;
        latest.reduceOp = c10d::ReduceOp::MAX;
        gloo->allreduce(time, latest)->wait();
        kernel.begin = time[0].item<double>();
      }
      if (auto work = call()) work->wait();
      free_at = kernel.begin + kernel.cost;
    }
    message->complete(writes);
    return message;
  }
  // A collective that reduces. Gloo has no average: a sum is divided. To wait for gloo's
  // reduce-scatter a second time would copy the undivided sum again.
  template <typename Options, typename F>
  WorkPtr reduction(OpType type, Options options, Tensors reads, Tensors writes, F call) {
    const bool is_average = options.reduceOp == c10d::ReduceOp::AVG;
    if (is_average) options.reduceOp = c10d::ReduceOp::SUM;
    return collective(type, options.asyncOp, reads, writes, [&] {
      auto work = call(options);
      work->wait();
      for (auto& t : on_cpu(writes))
        if (is_average) t.div_(getSize());
      return WorkPtr();
    });
  }
  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& options) override {
    auto list = on_cpu(ts);
    return reduction(OpType::ALLREDUCE, options, {}, ts,
                     [&](auto& options) { return gloo->allreduce(list, options); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    auto list = on_cpu({out, in});
    return reduction(OpType::_REDUCE_SCATTER_BASE, options, {in}, {out}, [&](auto& options) {
      return gloo->_reduce_scatter_base(list[0], list[1], options);
    });
  }
  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& options) override {
    auto list = on_cpu(ts);
    return collective(OpType::BROADCAST, options.asyncOp, {}, ts,
                      [&] { return gloo->broadcast(list, options); });
  }
  WorkPtr allgather(vector<Tensors>& out, Tensors& in,
                    const c10d::AllgatherOptions& options) override {
    Tensors list = on_cpu(in);
    vector<Tensors> lists = {on_cpu(out.at(0))};
    return collective(OpType::ALLGATHER, options.asyncOp, in, out[0],
                      [&] { return gloo->allgather(lists, list, options); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto list = on_cpu({out, in});
    return collective(OpType::_ALLGATHER_BASE, options.asyncOp, {in}, {out},
                      [&] { return gloo->_allgather_base(list[0], list[1], options); });
  }
  WorkPtr gather(vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto list = on_cpu(in);
    vector<Tensors> lists;  // none but where rank is the root
    if (!out.empty()) lists.push_back(on_cpu(out[0]));
    return collective(OpType::GATHER, options.asyncOp, in, out.empty() ? Tensors() : out[0],
                      [&] { return gloo->gather(lists, list, options); });
  }
  WorkPtr scatter(Tensors& out, vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto list = on_cpu(out);
    vector<Tensors> lists;  // none but where rank is the root
    if (!in.empty()) lists.push_back(on_cpu(in[0]));
    return collective(OpType::SCATTER, options.asyncOp, in.empty() ? Tensors() : in[0], out,
                      [&] { return gloo->scatter(list, lists, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return collective(OpType::BARRIER, options.asyncOp, {}, {},
                      [&] { return gloo->barrier(options); });
  }
  // A message between two processes: first the time at which it is sent, then the tensor.
  WorkPtr transfer(bool sends, Tensors& ts, int other, int tag) {
    auto message = begin(sends ? OpType::SEND : OpType::RECV, {}, ts, true);
    auto kernel = std::make_shared<optional<Kernel>>();
    kernel->emplace(*stream, COMM, sends ? "SEND" : "RECV");
    note_access(ts.at(0), **kernel, !sends);
    Tensors time = {at::full({1}, (*kernel)->begin, at::kDouble)}, data = on_cpu(ts);
    if (sends) data[0] = data[0].clone();
    auto call = [&](Tensors& list) {
      return sends ? gloo->send(list, other, tag) : gloo->recv(list, other, tag);
    };
    auto first = call(time), second = call(data);
    if (sends) {
      message->complete(ts);  // at once: who sends does not wait for the other one
      kernel->reset();
    }
    message->arrive = [=, self = message.get()] {
      first->wait();
      second->wait();
      if (sends) return;
      if (SIM) (*kernel)->begin = std::max((*kernel)->begin, time[0].item<double>());
      kernel->reset();  // the stream is free
      self->complete(self->kept);
    };
    return message;
  }
  WorkPtr send(Tensors& ts, int to, int tag) override { return transfer(true, ts, to, tag); }
  WorkPtr recv(Tensors& ts, int from, int tag) override { return transfer(false, ts, from, tag); }
};
struct Timer final : c10d::Timer {  // of DDP's logger, which asks for one
  explicit Timer(Device) {}
  optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
}  // namespace
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, ::Timer)
}

// == Python ==
PYBIND11_MODULE(emu_C, m) {
  pthread_atfork(nullptr, nullptr, [] { is_bad_fork |= is_started; });
  c10::SetAllocator(EMU, &memory);
  static c10::impl::DeviceGuardImplRegistrar registrar(EMU, &the_guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("wrap", [](c10d::Backend* gloo) -> c10::intrusive_ptr<c10d::Backend> {
    auto inner = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(gloo);
    return c10::make_intrusive<EmuCCL>(inner);
  });
  m.def("device_count", [] { return DEVICES; });
  m.def("is_bad_fork", [] { return is_bad_fork; });
  m.def("host_waits", [] { return host_waits; });
  m.def("sleep",
        [](double seconds) { Kernel kernel(stream_of(the_guard.getDevice()), seconds, "sleep"); });
}
