/* The lists that letters are in, and how a letter ends. */
#include "p2p/request.h"

void ah_list_append(struct ah_list *list, struct ah_letter *letter)
{
    letter->list = list;
    letter->next = NULL;
    letter->previous = list->last;
    if (list->last)
        list->last->next = letter;
    else
        list->first = letter;
    list->last = letter;
}

void ah_list_take_out(struct ah_letter *letter)
{
    struct ah_list *list = letter->list;

    if (!list)
        return;
    if (letter->previous)
        letter->previous->next = letter->next;
    else
        list->first = letter->next;
    if (letter->next)
        letter->next->previous = letter->previous;
    else
        list->last = letter->previous;
    letter->list = NULL;
}

void ah_list_move(struct ah_list *list, struct ah_letter *letter)
{
    ah_list_take_out(letter);
    ah_list_append(list, letter);
}

void ah_letter_remove(struct ah_mail *mail, struct ah_letter *letter)
{
    if (letter->list && letter->message.sends && letter->state == AH_WAITS)
        mail->waiting_sends--;
    ah_list_take_out(letter);
    if (letter->later)
        letter->later->earlier = letter->earlier;
    else if (mail->latest == letter)
        mail->latest = letter->earlier;
    if (letter->earlier)
        letter->earlier->later = letter->later;
    letter->later = letter->earlier = NULL;
}

void ah_letter_tell(struct ah_mail *mail, struct ah_letter *letter)
{
    ah_list_append(&mail->finished, letter);
    ah_mail_call_server(mail);
}

void ah_letter_end(struct ah_mail *mail, struct ah_letter *letter, int code, uint32_t peer)
{
    ah_letter_remove(mail, letter);
    letter->state = AH_OVER;
    letter->outcome = (struct ah_outcome){.code = code, .peer = peer};
    if (letter->posted) {
        mail->posted--;
        mail->posted_sends -= (size_t)letter->message.sends;
        if (letter->awaited == 0)
            ah_letter_tell(mail, letter);
    }
    atomic_store_explicit(&letter->over, 1, memory_order_release);
    /* A thread of our own may sleep until this one is over. */
    ah_ring(mail->group, mail->group->rank);
}
