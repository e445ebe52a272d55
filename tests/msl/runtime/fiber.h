// Stacks that a GPU thread runs on, and the switch from one to another.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

namespace msl {

constexpr size_t stack_bytes = 128 << 10;
constexpr size_t guard_bytes = 16 << 10;  // a page on every system

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
// Saves what a call must preserve on this stack, leaves the stack pointer in *from, and returns
// on the other stack.
__attribute__((naked, noinline)) inline void switch_stack(void** /*from*/, void* /*to*/) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq)");
}
constexpr int saved_words = 8;     // six registers, the return address, one word of alignment
constexpr int return_address = 6;  // word
#else
__attribute__((naked, noinline)) inline void switch_stack(void** /*from*/, void* /*to*/) {
  asm(R"(
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret)");
}
constexpr int saved_words = 20;
constexpr int return_address = 11;  // x30
#endif

// A stack that begins `entry` when it is first switched to. `entry` must not return.
inline void* prepare_stack(char* stack, void (*entry)()) {
  void** top = (void**)(stack + stack_bytes) - saved_words;
  for (int i = 0; i < saved_words; i++) top[i] = nullptr;
  top[return_address] = (void*)entry;
  return top;
}

#else
#error "no stack switch for this processor: write one beside the two above"
#endif

// `count` stacks in a row, a page that faults below each.
inline char* reserve_stacks(unsigned count) {
  const size_t stride = stack_bytes + guard_bytes;
  char* base = (char*)mmap(nullptr, count * stride, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  for (unsigned i = 0; i < count; i++) mprotect(base + i * stride, guard_bytes, PROT_NONE);
  return base;
}
inline char* stack_of(char* stacks, unsigned index) {
  return stacks + index * (stack_bytes + guard_bytes) + guard_bytes;
}

}  // namespace msl
