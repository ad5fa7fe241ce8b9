# The kernel archives as read-only data (see embedded_kernels.cc).
    .section .rodata
    .balign 64
    .globl attnd_kernels_sm_70, attnd_kernels_sm_70_end
attnd_kernels_sm_70:
    .incbin "kernels/library/kernels_sm_70.cubins"
attnd_kernels_sm_70_end:
    .balign 64
    .globl attnd_kernels_sm_90, attnd_kernels_sm_90_end
attnd_kernels_sm_90:
    .incbin "kernels/library/kernels_sm_90.cubins"
attnd_kernels_sm_90_end:
    .section .note.GNU-stack, "", %progbits
