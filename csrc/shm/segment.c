#include "shm/segment.h"

#include <string.h>
#include <unistd.h>

#include "p2p/mailbox.h"

#define PAGE 4096u

/* Assumed size of L2 where the system does not report it. */
#define SECOND_LEVEL ((size_t)1 << 20)

static const uint64_t MAGIC = 0x73646e61686c6c61; /* "allhands" */
static const uint32_t VERSION = 6;

static size_t pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static size_t payloads_offset(uint32_t ranks)
{
    return pages(sizeof(struct ah_header)) + pages(ranks * sizeof(struct ah_member));
}

static size_t slots_offset(uint32_t ranks)
{
    return payloads_offset(ranks) + (size_t)ranks * AH_CALL_DEPTH * AH_PAYLOAD_BYTES;
}

static size_t mailboxes_offset(uint32_t ranks, size_t slot_bytes)
{
    return slots_offset(ranks) + (size_t)ranks * AH_SLOTS * (pages(slot_bytes) + PAGE);
}

static size_t helpers_offset(uint32_t ranks, size_t slot_bytes)
{
    return mailboxes_offset(ranks, slot_bytes) + pages(ah_mailboxes_bytes(ranks));
}

static size_t helper_bytes(uint32_t ranks)
{
    return pages(ranks * sizeof(struct ah_member)) + ranks * AH_SLOTS * (AH_HELPER_SLOT_BYTES + PAGE);
}

size_t ah_segment_bytes(uint32_t ranks, size_t slot_bytes, uint32_t helper_threads)
{
    return helpers_offset(ranks, slot_bytes) + helper_threads * helper_bytes(ranks);
}

int ah_has_victim_l3(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}

/* Bytes that a rank writes before it reuses a line. A line that other ranks have read is in their L2; rewriting it is
 * three to five times as fast once it has been evicted from there (64 KiB, two ranks: 2 us against 7 to 10; with rings
 * of all ranks that take 1, 4, 16 and 50 times an L2: 6, 2, 4 and 6 us, the last beyond L3). Without a victim L3
 * rotation costs a few percent. */
static size_t ring_bytes(uint32_t ranks, int victim_l3)
{
    long second = sysconf(_SC_LEVEL2_CACHE_SIZE);

    return victim_l3 ? 4 * (second > 0 ? (size_t)second : SECOND_LEVEL) / ranks : 0;
}

void ah_segment_format(void *memory, uint32_t ranks, size_t slot_bytes, uint32_t helper_threads, int victim_l3,
                       const unsigned char nonce[16])
{
    struct ah_header *head = memory;

    head->version = VERSION;
    head->ranks = ranks;
    head->helper_threads = helper_threads;
    head->slot_bytes = slot_bytes;
    head->ring_bytes = ring_bytes(ranks, victim_l3);
    head->victim_l3 = victim_l3 != 0;
    head->total_bytes = ah_segment_bytes(ranks, slot_bytes, helper_threads);
    memcpy(head->nonce, nonce, sizeof head->nonce);
    head->magic = MAGIC;
}

int ah_segment_open(struct ah_group *group, void *memory, size_t bytes, uint32_t rank,
                    const unsigned char nonce[16], int *pidfds)
{
    struct ah_header *head = memory;

    if (bytes < sizeof *head || head->magic != MAGIC || head->version != VERSION || rank >= head->ranks)
        return AH_INVALID;
    if (head->helper_threads > AH_MAX_HELPER_THREADS || head->total_bytes != bytes ||
        bytes != ah_segment_bytes(head->ranks, head->slot_bytes, head->helper_threads))
        return AH_INVALID;
    if (memcmp(head->nonce, nonce, sizeof head->nonce) != 0)
        return AH_INVALID;
    memset(group, 0, sizeof *group);
    group->head = head;
    group->members = (struct ah_member *)((unsigned char *)memory + pages(sizeof *head));
    group->payloads = (unsigned char *)memory + payloads_offset(head->ranks);
    group->slots = (unsigned char *)memory + slots_offset(head->ranks);
    group->slot_bytes = head->slot_bytes;
    group->slot_stride = pages(head->slot_bytes) + PAGE;
    group->ring_bytes = head->ring_bytes;
    group->victim_l3 = head->victim_l3 != 0;
    group->mailboxes = (unsigned char *)memory + mailboxes_offset(head->ranks, head->slot_bytes);
    group->rank = rank;
    group->ranks = head->ranks;
    group->pidfds = pidfds;
    return AH_OK;
}

void ah_segment_helper_view(const struct ah_group *group, uint32_t helper, struct ah_group *view)
{
    const struct ah_header *head = group->head;
    unsigned char *own = (unsigned char *)group->head + helpers_offset(head->ranks, head->slot_bytes) +
                         helper * helper_bytes(head->ranks);

    memset(view, 0, sizeof *view);
    view->head = group->head;
    view->members = (struct ah_member *)own;
    view->slots = own + pages(head->ranks * sizeof(struct ah_member));
    view->slot_bytes = AH_HELPER_SLOT_BYTES;
    view->slot_stride = AH_HELPER_SLOT_BYTES + PAGE;
    view->rank = group->rank;
    view->ranks = group->ranks;
    view->pidfds = group->pidfds;
}
