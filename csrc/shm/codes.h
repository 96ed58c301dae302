/* Numbers of dtypes, reductions, operations and outcomes, each with its name: the only definition. `_core` exports them
 * to Python as DTYPES, REDUCTIONS, OPERATIONS and OUTCOMES. Ranks compare the numbers, so a change needs a new segment
 * version. */
#ifndef ALLHANDS_CODES_H
#define ALLHANDS_CODES_H

/* X(C name, number, name in Python and in the flight recorder). Dtypes have torch's names. */
#define AH_DTYPES(X)        \
    X(U8, 1, "uint8")       \
    X(I8, 2, "int8")        \
    X(U16, 3, "uint16")     \
    X(I16, 4, "int16")      \
    X(U32, 5, "uint32")     \
    X(I32, 6, "int32")      \
    X(U64, 7, "uint64")     \
    X(I64, 8, "int64")      \
    X(BOOL, 9, "bool")      \
    X(F16, 10, "float16")   \
    X(BF16, 11, "bfloat16") \
    X(F32, 12, "float32")   \
    X(F64, 13, "float64")

#define AH_REDUCTIONS(X)      \
    X(SUM, 1, "SUM")          \
    X(AVG, 2, "AVG")          \
    X(PRODUCT, 3, "PRODUCT")  \
    X(MIN, 4, "MIN")          \
    X(MAX, 5, "MAX")          \
    X(BAND, 6, "BAND")        \
    X(BOR, 7, "BOR")          \
    X(BXOR, 8, "BXOR")        \
    X(PREMUL_SUM, 9, "PREMUL_SUM")

/* send and recv are never in a fingerprint. */
#define AH_OPERATIONS(X)                    \
    X(BARRIER, 1, "barrier")                \
    X(ALL_REDUCE, 2, "all_reduce")          \
    X(REDUCE, 3, "reduce")                  \
    X(BROADCAST, 4, "broadcast")            \
    X(ALL_GATHER, 5, "all_gather")          \
    X(GATHER, 6, "gather")                  \
    X(SCATTER, 7, "scatter")                \
    X(REDUCE_SCATTER, 8, "reduce_scatter")  \
    X(ALL_TO_ALL, 9, "all_to_all")          \
    X(SEND, 10, "send")                     \
    X(RECV, 11, "recv")

/* How a call ended. The group's `culprit` is the rank that caused it.
 *   timeout      the deadline passed while waiting for the culprit
 *   dead         the culprit's process ended
 *   aborted      a rank aborted the group
 *   mismatch     the culprit made a different call
 *   invalid      an argument or the segment is not valid
 *   interrupted  a signal handler raised
 *   left         the culprit left the group without making this call */
#define AH_OUTCOMES(X)            \
    X(OK, 0, "ok")                \
    X(TIMEOUT, 1, "timeout")      \
    X(DEAD, 2, "dead")            \
    X(ABORTED, 3, "aborted")      \
    X(MISMATCH, 4, "mismatch")    \
    X(INVALID, 5, "invalid")      \
    X(INTERRUPTED, 6, "interrupted") \
    X(LEFT, 7, "left")

#define AH_ENUMERATOR(name, number, text) AH_##name = number,

/* AH_RAW: bytes that are only copied. Larger numbers are dtypes of the caller's that are compared and copied. */
enum ah_dtype { AH_DTYPES(AH_ENUMERATOR) AH_RAW = 14 };

/* Added to the number of a real dtype: complex numbers with such parts. Reduced as their parts, compared as a dtype of
 * their own. */
#define AH_COMPLEX 0x100u

/* PREMUL_SUM: a sum of values that the caller has multiplied; a number of its own, so that peers distinguish it from
 * SUM. */
enum ah_reduction { AH_REDUCTIONS(AH_ENUMERATOR) };

enum ah_operation_code { AH_OPERATIONS(AH_ENUMERATOR) };

enum ah_outcome_code { AH_OUTCOMES(AH_ENUMERATOR) };

#endif
