// A pretended CUDA device: tensors that are labelled cuda:0, whose numbers lie in memory of the host and are computed by
// the kernels of the CPU. Loaded before torch is imported (tests/pretend/__init__.py).
//
// Every operation that has a kernel for the CPU gets `pretended` as its kernel for CUDA. It refuses tensors of both
// devices where CUDA does, shows the CPU's kernel the same memory under the CPU's label, labels what comes out, and
// reports where a host would have waited for the device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
const c10::Device CUDA(DeviceType::CUDA, 0);

// -- waits of the host ------------------------------------------------------------------------------------------------

void (*report)(const char* what, int64_t bytes) = nullptr;

void waits(const char* what, int64_t bytes = 0) {
  if (report) report(what, bytes);
}

// -- memory, devices and streams --------------------------------------------------------------------------------------

std::mutex pinning;
std::unordered_map<char*, size_t> pinned; // where page-locked memory begins, and how much of it there is

void unpin(void* at) {
  {
    std::lock_guard<std::mutex> lock(pinning);
    pinned.erase(static_cast<char*>(at));
  }
  c10::free_cpu(at);
}

bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> lock(pinning);
  for (auto& [begin, bytes] : pinned)
    if (at >= begin && at < begin + bytes) return true;
  return false;
}

struct Memory : c10::Allocator {
  const bool locked;
  explicit Memory(bool locked) : locked(locked) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (locked && at) {
      std::lock_guard<std::mutex> lock(pinning);
      pinned[static_cast<char*>(at)] = bytes;
    }
    return {at, at, raw_deleter(), locked ? c10::Device(DeviceType::CPU) : CUDA};
  }
  c10::DeleterFnPtr raw_deleter() const override { return locked ? &unpin : &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory on_device(false), page_locked(true);
static const bool memory_is_set = (c10::SetAllocator(DeviceType::CUDA, &on_device, 255), true);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return CUDA; }
  c10::Device getDevice() const override { return CUDA; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits("stream.synchronize"); }
  void synchronizeEvent(void*) const override { waits("event.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { waits("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
  at::Allocator* getCUDADeviceAllocator() const override { return &on_device; }
  void deviceSynchronize(DeviceIndex) const override { waits("synchronize"); }
};

} // namespace

namespace at {
using PretendedHooks = Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
} // namespace at

namespace {

// -- operations -------------------------------------------------------------------------------------------------------

bool on_cuda(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

at::Tensor labelled(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

const std::unordered_set<std::string> MIXES = { // what CUDA takes from the host beside its own
    "aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::set_"};
const std::unordered_set<std::string> ASKS = { // whose result has a shape, or a check, that the host asks for
    "nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim", "equal", "bincount",
    "_linalg_check_errors", "multinomial", "histc"};

struct Call {
  const c10::FunctionSchema& schema;
  std::vector<std::pair<at::Tensor, at::Tensor>> shown; // a tensor of the device, and the CPU's view of its memory
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases; // of storages of the device
  std::unordered_map<c10::StorageImpl*, at::Tensor> owners; // a tensor of the device for each of those aliases
  std::vector<at::Tensor> plain; // tensors of the host that are more than one number
  std::optional<bool> asked; // whether the outputs are asked for on the device
  bool host_generator = false;

  at::Tensor show(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      if (t.dim() > 0 && t.is_cpu()) plain.push_back(t);
      return t;
    }
    auto owner = t.storage();
    auto& alias = aliases[owner.unsafeGetStorageImpl()];
    if (!alias) {
      c10::DataPtr ptr(owner.mutable_data(), c10::Device(DeviceType::CPU));
      alias = c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(), std::move(ptr), c10::GetCPUAllocator(), true);
      owners[alias.unsafeGetStorageImpl()] = t;
    }
    auto made = labelled(alias, t, c10::DispatchKey::CPU);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    shown.emplace_back(t, made);
    return made;
  }

  IValue lowered(const IValue& v) {
    if (v.isTensor()) return show(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor& t : v.toTensorVector()) out.push_back(show(t));
      return out;
    }
    if (v.isList() && v.toListRef().size() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> out;
      for (const IValue& one : v.toListRef())
        out.push_back(one.isTensor() ? std::optional<at::Tensor>(show(one.toTensor())) : std::nullopt);
      return out;
    }
    if (v.isDevice()) {
      asked = v.toDevice().is_cuda();
      return c10::Device(DeviceType::CPU);
    }
    if (v.isGenerator()) host_generator = v.toGenerator().defined() && v.toGenerator().device().is_cpu();
    return v;
  }

  void refuse_mixes() const {
    if (host_generator && (!shown.empty() || asked.value_or(false)))
      TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu', in ", schema.name());
    if (shown.empty() || plain.empty()) return;
    auto name = schema.name();
    bool indexes = name.find("index") != std::string::npos;
    if (MIXES.count(name) || MIXES.count(name + "." + schema.overload_name())) {
      if (!indexes || shown.front().first.unsafeGetTensorImpl() == first) return;
    }
    std::stringstream shapes;
    for (auto& [t, _] : shown) shapes << " cuda:0" << t.sizes();
    for (auto& t : plain) shapes << " cpu" << t.sizes();
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
                name, ":", shapes.str(), ")");
  }
  const c10::TensorImpl* first = nullptr; // the first argument

  // What an operation resized is resized on the device.
  void settle() {
    for (auto& [t, view] : shown) {
      auto owner = t.storage();
      auto alias = view.storage();
      if (alias.data() != owner.data() || alias.nbytes() != owner.nbytes()) {
        auto* kept = new c10::Storage(alias);
        owner.set_data_ptr_noswap(
            {alias.mutable_data(), kept, [](void* s) { delete static_cast<c10::Storage*>(s); }, CUDA});
        owner.set_nbytes(alias.nbytes());
      }
      if (view.sizes() != t.sizes() || view.strides() != t.strides() || view.storage_offset() != t.storage_offset())
        t.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    }
  }

  at::Tensor raised(const at::Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [original, view] : shown)
      if (view.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return original;
    auto owner = owners.find(t.storage().unsafeGetStorageImpl());
    if (owner != owners.end()) { // a view; in inference mode a view of a normal tensor is a normal tensor
      auto& base = owner->second;
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return made;
    }
    auto* kept = new c10::Storage(t.storage());
    c10::DataPtr ptr(kept->mutable_data(), kept, [](void* s) { delete static_cast<c10::Storage*>(s); }, CUDA);
    c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(ptr), &on_device, true);
    return labelled(std::move(storage), t, c10::DispatchKey::CUDA);
  }

  IValue raised(const IValue& v) {
    if (v.isTensor()) return raised(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor& t : v.toTensorVector()) out.push_back(raised(t));
      return out;
    }
    return v;
  }

  // Where the host waits. Copies are reported where they are made.
  void count_waits(const IValue* arguments) const {
    auto name = schema.name().substr(schema.name().find("::") + 2);
    if (ASKS.count(name)) waits(name.c_str());
    if (name == "_local_scalar_dense") waits("item", shown.front().first.itemsize());
    if (name == "repeat_interleave" && schema.overload_name() == "Tensor" && arguments[1].isNone()) waits("repeat_interleave");
    if (name.find("index") == std::string::npos || schema.arguments().size() < 2 || !arguments[1].isList()) return;
    bool mask = false;
    for (auto& [t, _] : shown) mask |= t.scalar_type() == at::kBool && t.unsafeGetTensorImpl() != first;
    for (auto& t : plain) mask |= t.scalar_type() == at::kBool;
    if (mask) waits("an index that is a mask");
    else if (!plain.empty()) waits("an index of the host");
  }
};

void pretended(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call{op.schema()};
  size_t n = call.schema.arguments().size(), begin = stack->size() - n;
  if (n && (*stack)[begin].isTensor()) call.first = (*stack)[begin].toTensor().unsafeGetTensorImpl();
  for (size_t i = begin; i < stack->size(); i++) (*stack)[i] = call.lowered((*stack)[i]);
  call.refuse_mixes();
  call.count_waits(stack->data() + begin);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.settle();
  if (!call.asked.value_or(!call.shown.empty())) return;
  for (size_t i = stack->size() - call.schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.raised((*stack)[i]);
}

at::Tensor& copied(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  Call call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "").schema()};
  bool in = on_cuda(self) && !on_cuda(from), out = !on_cuda(self) && on_cuda(from);
  if (in && from.numel() && !(non_blocking && is_pinned(from.storage().data()))) waits("to the device", from.nbytes());
  if (out && from.numel() && !(non_blocking && is_pinned(self.storage().data()))) waits("to the host", from.nbytes());
  auto to = call.show(self), what = call.show(from);
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(what);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> steps = strides.vec();
  if (steps.empty() && !sizes.empty()) {
    steps.assign(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i-- > 0;) steps[i] = steps[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  }
  impl->set_sizes_and_strides(sizes, steps, offset);
  return self;
}

at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  auto n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {n}, {1});
}

void recorded_on_stream(at::Tensor&, at::Stream) {}

struct Registered {
  torch::Library aten{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
  torch::Library others{torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__};
  Registered() {
    const std::unordered_set<std::string> own = {"copy_", "set_", "record_stream"};
    const std::unordered_set<std::string> composite = {"aten::convolution", "aten::convolution_backward"};
    auto& all = c10::Dispatcher::singleton();
    for (const auto& name : all.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || own.count(name.name.substr(6))) continue;
      auto op = all.findOp(name);
      if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || composite.count(name.name))) continue;
      if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
      auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&pretended>());
    }
    aten.impl("copy_", &copied);
    aten.impl("set_.source_Storage_storage_offset", &set_storage);
    aten.impl("set_.source_Storage", &set_whole);
    aten.impl("set_.source_Tensor", &set_source);
    aten.impl("record_stream", &recorded_on_stream);
    others.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended>());
  }
};
Registered registered;

} // namespace

extern "C" void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto made = on_device.allocate(bytes);
  auto kept = std::min(bytes, storage->nbytes());
  if (kept) on_device.copy_data(made.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

extern "C" void report_waits_to(void (*to)(const char*, int64_t)) { report = to; }
